# SPDX-License-Identifier: Apache-2.0
"""The summary in a terminal: one line when all is well, tables when it is not."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

from lockstep.audit.rules import all_codes
from lockstep.audit.rules.liveness_text import standing
from lockstep.audit.selection import Selection, left_out_in_words
from lockstep.audit.tables import TABLE_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.finding import Finding
    from lockstep.audit.world import World

_WIDTH = 98
_LABEL = 9

EVERYTHING: Final = Selection()


def render(
    findings: Sequence[Finding],
    world: World,
    asked: Selection = EVERYTHING,
    left_out: Sequence[Finding] = (),
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
    head = f"lockstep audit: {_many(world.steps, 'step')}, {_many(world.size, 'rank')}, {rules}"
    rest = [f"  {words}" for words in [left_out_in_words(left_out)] if words] + _unseen(world)
    if not graver:
        verdict = _verdict(world, bool(notices), bool(left_out))
        lines = [f"{head}: {verdict}"]
        lines += [f"  notice {f.code}: {f.message}" for f in notices]
        return "\n".join([*lines, *rest])
    errors = sum(1 for f in graver if f.severity == "error")
    counted = f"{_many(errors, 'error')}, {_many(len(graver) - errors, 'warning')}"
    blocks = [f"{head}: {counted}", *(_block(f) for f in graver)]
    blocks += [f"notice {f.code}: {f.message}" for f in notices]
    return "\n\n".join([*blocks, *rest])


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _unseen(world: World) -> list[str]:
    """What the audit wanted to look at and could not: nothing is said of that."""
    errors = [error for errors in world.fact("unseen") for error in errors]
    return [f"  could not look at everything, e.g. {errors[0]}"] if errors else []


def _verdict(world: World, has_notices: bool, has_left_out: bool) -> str:
    if world.has_failed:
        return f"the run failed ({_failures(world)}); nothing else was found until then"
    if world.size == 1 and world.steps:
        return (
            "one process trained, so there was nothing to compare; run it on two: "
            "lockstep audit --nproc-per-node 2 ..."
        )
    if not world.steps:
        return "no optimizer step was seen, so nothing was compared"
    if has_left_out:
        return "nothing else was found"
    return "in lockstep" + (", with notices" if has_notices else "")


def _failures(world: World) -> str:
    failed = {
        rank: led for rank, led in world.ledgers.items() if led.failure is not None or led.exit_code
    }
    lost = [
        f"rank {rank} left no record" for rank in range(world.size) if rank not in world.ledgers
    ]
    return "; ".join([*(f"rank {r} {standing(led)}" for r, led in failed.items()), *lost])


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
    lines = ["", f"  gradient of {rows[0]['parameter']}[0], by rank{_cut(rows)}"]
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
    lines = ["", f"  drift: {drift}{_cut(rows)}"]
    lines.append("  step |        drift")
    lines += [f"  {row['step']:>4} | {row['drift']:>12.6f}" for row in rows]
    return lines


def _cut(rows: Sequence[Any]) -> str:
    return f", the first {TABLE_ROWS} steps" if len(rows) == TABLE_ROWS else ""
