# SPDX-License-Identifier: Apache-2.0
"""The report as one page: a single file, without network, light and dark, wide and narrow."""

from __future__ import annotations

import html
import linecache
import re
import shlex
from typing import TYPE_CHECKING, Any

from lockstep.audit.finding import SEVERITIES
from lockstep.audit.report.charts import (
    coefficients,
    coefficients_of_tracks,
    curves,
    curves_of_tracks,
    differences_map,
)
from lockstep.audit.report.document import document
from lockstep.audit.report.words import many, unseen_in_words, verdict
from lockstep.audit.rules import all_codes
from lockstep.audit.selection import Selection, left_out_in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.finding import Finding, Place
    from lockstep.audit.world import World

_AROUND = 3
_FINDINGS = 40
_CODE = re.compile(r"`([^`]+)`")


def page(
    findings: Sequence[Finding],
    world: World,
    summary: dict[str, Any],
    left_out: Sequence[Finding] = (),
) -> str:
    """The whole page as text. What comes from the program is escaped."""
    shown = findings[:_FINDINGS]
    more = len(findings) - len(shown)
    body = "".join(_section(f) for f in shown)
    if more > 0:
        body += f"<p class=soft>and {more} more in the JSON report</p>"
    if not any("gradients" in f.evidence or "drift" in f.evidence for f in shown):
        body += coefficients_of_tracks(world) + curves_of_tracks(world)
    title = _text(f"lockstep audit {shlex.join(summary['command'])}".strip())
    return document(
        title,
        f"<p>{_verdict(findings, world, left_out)}"
        f"<br><span class=soft>{_about(world, summary, left_out)}</span></p>"
        f"{body}{differences_map(world)}",
    )


def _about(world: World, summary: dict[str, Any], left_out: Sequence[Finding]) -> str:
    asked = Selection(tuple(summary["only"]), tuple(summary["ignore"]))
    ran = [
        many(world.steps, "step"),
        many(world.size, "rank"),
        asked.rules(all_codes()),
        left_out_in_words(left_out),
    ]
    where = [
        f"ended {summary['finished']}" if summary["finished"] else "",
        f"torch {summary['torch']}",
        f"lockstep {summary['lockstep']}",
    ]
    lines = [", ".join(filter(None, part)) for part in (ran, where)]
    return "<br>".join(map(_text, filter(None, [*lines, unseen_in_words(world)])))


def _verdict(findings: Sequence[Finding], world: World, left_out: Sequence[Finding]) -> str:
    if not findings:
        said = verdict(world, has_left_out=bool(left_out))
        return f"<b class=good>{said}</b>" if said == "in lockstep" else _text(said)
    kinds = [finding.severity for finding in findings]
    return ", ".join(many(kinds.count(kind), kind) for kind in reversed(SEVERITIES))


def _section(finding: Finding) -> str:
    step = f"step {finding.step}, " if finding.step else ""
    ranks = ", ".join(map(str, finding.rank))
    about = f"{finding.severity}, {step}ranks {ranks}" if ranks else finding.severity
    parts = [
        f"<section class={finding.severity} id={finding.code}>",
        f"<h2>{finding.code} {_text(finding.name)}</h2><p class=soft>{_text(about)}</p>",
        f"<p>{_prose(finding.message)}</p><p><b>Fix:</b> {_prose(finding.fix)}</p>",
        "".join(_source(place) for place in finding.where[:4]),
    ]
    if finding.parameters:
        listed = ", ".join(finding.parameters[:20])
        parts.append(f"<p class=soft>Parameters: <code>{_text(listed)}</code></p>")
    parts.append(coefficients(finding.evidence))
    parts.append(curves(finding.evidence))
    return "".join(parts) + "</section>"


def _source(place: Place) -> str:
    lines = []
    for number in range(max(1, place.line - _AROUND), place.line + _AROUND + 1):
        text = linecache.getline(place.file, number).rstrip("\n")
        if not text and number > place.line:
            break
        shown = f"{number:>5}  {_text(text)}"
        lines.append(f"<mark>{shown}</mark>" if number == place.line else shown)
    head = f"{_text(place.at)} in {_text(place.function)}"
    return f"<div class=soft>{head}</div><pre>{chr(10).join(lines)}</pre>"


def _prose(text: str) -> str:
    """Escaped, with what stands between backticks set as code."""
    return _CODE.sub(r"<code>\1</code>", _text(text))


def _text(value: Any) -> str:
    return html.escape(str(value))
