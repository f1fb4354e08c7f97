# SPDX-License-Identifier: Apache-2.0
"""The steps that ``lockstep replay --around`` has examined, as tables of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep.trainer.step_examination import finite_median, loss_name, outstanding_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lockstep.trainer.step_examination import ExaminedStep, StepExamination

_MOST_LAYERS: Final = 5
_MOST_SAMPLES: Final = 5


def render_examination(examination: StepExamination, step: int) -> str:
    """The examined steps as tables of text, and what stands out in one of them."""
    steps = examination.examined
    name = loss_name(steps)
    lines = [
        f"  {'step':>8}  {'epoch.batch':>11}  {name:>12}  {'gradient':>10}  {'learning rate':>13}"
    ]
    for each in steps:
        lines.append(
            f"{'>' if each.step == step else ' '} {each.step:>8}  "
            f"{f'{each.at[0]}.{each.at[1]}':>11}  {_number(each.metrics.get(name)):>12}  "
            f"{_number(each.norm):>10}  {', '.join(map(_number, each.rates[:3])):>13}"
        )
    at = next((each for each in steps if each.step == step), None)
    if at is not None:
        lines += _layers_in_words(at, steps)
        lines += _samples_in_words(at)
    return "\n".join(lines)


def _layers_in_words(at: ExaminedStep, steps: Sequence[ExaminedStep]) -> Iterator[str]:
    if not at.norms:
        return
    yield f"gradient of step {at.step} by layer, beside the median of the other steps:"
    for layer, norm, times in outstanding_layers(at, steps)[:_MOST_LAYERS]:
        beside = "" if times is None else f"  {times:.3g} times"
        yield f"    {layer:<32}  {_number(norm):>10}{beside}"


def _samples_in_words(at: ExaminedStep) -> Iterator[str]:
    if at.no_samples_because is not None:
        yield f"samples by themselves: not known ({at.no_samples_because})"
    elif at.samples:
        middle = finite_median([each.loss for each in at.samples])
        yield f"samples of step {at.step}, each by itself; the median loss is {middle:.4g}:"
        for each in at.samples[:_MOST_SAMPLES]:
            yield f"    {each.name:<24}  shard {each.shard:<3}  {_number(each.loss):>10}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
