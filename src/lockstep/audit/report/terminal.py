# SPDX-License-Identifier: Apache-2.0
"""The summary in a terminal: one line when all is well, tables when it is not."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from lockstep.audit.report.words import cut, many, unseen_in_words, verdict
from lockstep.audit.rules import all_codes
from lockstep.audit.selection import left_out_in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.finding import Finding
    from lockstep.audit.selection import Selection
    from lockstep.audit.world import World

_WIDTH = 98
_LABEL = 9


def render(
    findings: Sequence[Finding],
    world: World,
    asked: Selection,
    left_out: Sequence[Finding],
) -> str:
    """The report as text.

    Args:
        findings: what is shown.
        world: what the ranks wrote down.
        asked: the rules that were asked for.
        left_out: what the others found.
    """
    graver = [f for f in findings if f.severity != "notice"]
    notices = [f for f in findings if f.severity == "notice"]
    rules = asked.rules(all_codes())
    head = f"lockstep audit: {many(world.steps, 'step')}, {many(world.size, 'rank')}, {rules}"
    told = (left_out_in_words(left_out), unseen_in_words(world))
    rest = [f"  {words}" for words in told if words]
    if not graver:
        said = verdict(world, has_left_out=bool(left_out))
        if notices and said == "in lockstep":
            said += ", with notices"
        lines = [f"{head}: {said}"]
        lines += [f"  notice {f.code}: {f.message}" for f in notices]
        return "\n".join([*lines, *rest])
    errors = sum(1 for f in graver if f.severity == "error")
    counted = f"{many(errors, 'error')}, {many(len(graver) - errors, 'warning')}"
    blocks = [f"{head}: {counted}", *(_block(f) for f in graver)]
    blocks += [f"notice {f.code}: {f.message}" for f in notices]
    return "\n\n".join([*blocks, *rest])


def _block(finding: Finding) -> str:
    lines = [f"{finding.severity} [{finding.code}] {finding.name}"]
    lines += _labelled("", finding.message)
    for place in finding.where[:5]:
        lines += _labelled("where" if place is finding.where[0] else "", f"{place}: {place.text}")
    if finding.parameters:
        shown = ", ".join(finding.parameters[:4])
        more = len(finding.parameters) - 4
        lines += _labelled("in", shown + (f" and {more} more" if more > 0 else ""))
    if isinstance(reason := finding.evidence.get("reason"), str):
        lines += _labelled("reason", reason)
    lines += _labelled("fix", finding.fix)
    lines += _labelled("more", f"lockstep explain {finding.code}")
    tables = _gradient_table(finding.evidence) + _drift_table(finding.evidence)
    return "\n".join([*lines, *tables])


def _labelled(label: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, _WIDTH - _LABEL - 2, break_long_words=False) or [""]
    first = f"  {label:<{_LABEL}}{wrapped[0]}"
    return [first, *(f"  {'':<{_LABEL}}{line}" for line in wrapped[1:])]


def _gradient_table(evidence: dict[str, Any]) -> list[str]:
    rows = evidence.get("gradients") or []
    if not rows:
        return []
    ranks = sorted({rank for row in rows for rank in row["values"]}, key=int)[:4]
    lines = ["", f"  gradient of {rows[0]['parameter']}[0], by rank{cut(rows)}"]
    lines.append("  step | " + " ".join(f"{'rank ' + r:>11}" for r in ranks) + " | the same")
    for row in rows:
        values = [row["values"].get(rank) for rank in ranks]
        shown = " ".join(f"{v:>11.5f}" if v is not None else f"{'-':>11}" for v in values)
        same = len(set(values)) == 1
        lines.append(f"  {row['step']:>4} | {shown} | {'yes' if same else 'no'}")
    return lines


def _drift_table(evidence: dict[str, Any]) -> list[str]:
    rows = evidence.get("drift") or []
    if not rows:
        return []
    drift = "largest difference between replicas after the step (sampled elements)"
    lines = ["", f"  drift: {drift}{cut(rows)}"]
    lines.append("  step |        drift")
    lines += [f"  {row['step']:>4} | {row['drift']:>12.6f}" for row in rows]
    return lines
