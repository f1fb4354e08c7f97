# SPDX-License-Identifier: Apache-2.0
"""The steps that ``lockstep replay --html`` has examined, as a page."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Final

from lockstep.audit.report.document import document
from lockstep.audit.report.line_chart import line_chart
from lockstep.trainer.step_examination import loss_name, outstanding_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.trainer.step_examination import ExaminedStep, StepExamination

_MOST_LAYERS: Final = 60
_MOST_SAMPLES: Final = 20


def examination_page(title: str, verdict: str, examination: StepExamination, step: int) -> str:
    """The page as text. What comes from the run is escaped.

    Args:
        title: of the page.
        verdict: what the comparison with the log said.
        examination: the steps.
        step: the one that was asked for.
    """
    steps = examination.examined
    at = next((each for each in steps if each.step == step), None)
    body = [f"<pre>{html.escape(verdict)}</pre>", _curves(steps)]
    if at is not None:
        body += [_layers(at, steps), _samples(at), _largest_samples(steps)]
    return document(html.escape(title), "".join(body))


def _curves(steps: Sequence[ExaminedStep]) -> str:
    name = loss_name(steps)
    losses = [(each.step, each.metrics.get(name)) for each in steps]
    norms = [(each.step, each.norm) for each in steps]
    rows = (
        (each.step, f"{each.at[1]} of epoch {each.at[0]}", each.metrics.get(name), each.norm)
        for each in steps
    )
    return _section(
        "The steps around it",
        line_chart(name, {name: losses}),
        line_chart("Norm of the gradient", {"gradient": norms}),
        _table(("step", "global batch", name, "gradient"), rows),
    )


def _layers(at: ExaminedStep, steps: Sequence[ExaminedStep]) -> str:
    rows = (
        (layer, norm, "-" if times is None else f"{times:.3g}")
        for layer, norm, times in outstanding_layers(at, steps)[:_MOST_LAYERS]
    )
    return _section(
        f"The gradient of step {at.step}, by layer",
        _table(("layer", "norm", "times the median of the other steps"), rows),
    )


def _samples(at: ExaminedStep) -> str:
    title = f"The samples of step {at.step}, each by itself"
    if at.no_samples_because is not None:
        return _section(title, f"<p>Not known: {html.escape(at.no_samples_because)}</p>")
    rows = ((each.name, each.shard, each.loss) for each in at.samples[:_MOST_SAMPLES])
    return _section(title, _table(("sample", "shard", "loss"), rows))


def _largest_samples(steps: Sequence[ExaminedStep]) -> str:
    rows = [
        (each.step, each.samples[0].name, each.samples[0].loss) for each in steps if each.samples
    ]
    table = _table(("step", "sample", "loss"), rows)
    return _section("The sample with the largest loss of each step", table) if rows else ""


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(parts)}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
