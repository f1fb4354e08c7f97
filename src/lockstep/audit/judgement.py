# SPDX-License-Identifier: Apache-2.0
"""All rules over all ledgers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.audit.finding import SEVERITIES, Finding
from lockstep.audit.precedence import without_consequences
from lockstep.audit.program_text.causes import with_causes
from lockstep.audit.rules import RULES
from lockstep.audit.selection import Selection
from lockstep.audit.world import World

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

    from lockstep.audit.ledger import Ledger
    from lockstep.audit.rules.base import Rule


def judge(
    ledgers: Sequence[Ledger | None],
    *,
    only: Collection[str] = (),
    ignore: Collection[str] = (),
) -> list[Finding]:
    """What the rules find, the gravest first.

    Args:
        ledgers: by rank; None for a rank that left none.
        only: codes, or beginnings of codes (``LS5``), to report; all if empty.
        ignore: codes, or beginnings, to leave out.
    """
    world = World(ledgers)
    found = without_consequences(f for rule in RULES for f in _judged_by(rule, world))
    kept, _ = Selection(tuple(only), tuple(ignore)).split(found)
    told = _one_for_each_line(map(with_causes, kept))
    return sorted(told, key=lambda f: (-SEVERITIES.index(f.severity), f.code))


def _one_for_each_line(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Of optimizers that a program makes again and again, as for each of many clients, one finding.

    The same is found for them, at the same lines, for the same parameters.
    """
    alike: dict[Hashable, dict[str, Finding]] = {}
    for one in findings:
        at = (one.code, one.severity, *one.where, *one.parameters)
        of_optimizers = alike.setdefault(at, {})
        if not one.where or one.optimizer in ("", "*", *of_optimizers):
            yield one
        else:
            of_optimizers[one.optimizer] = one
    for first, *others in (of.values() for of in alike.values() if of):
        also = [one.optimizer for one in others]
        said = (
            f" (and so for {len(also)} more optimizer{'s' if len(also) > 1 else ''})"
            if also
            else ""
        )
        evidence = {**first.evidence, "also": also} if also else first.evidence
        yield replace(first, message=first.message + said, evidence=evidence)


def _judged_by(rule: Rule, world: World) -> list[Finding]:
    """A rule that fails must not cost the others' findings; the report says that it did."""
    try:
        return list(rule.judge(world))
    except Exception as error:
        codes = [code.code for code in rule.codes]
        message = f"the rule of {', '.join(codes)}: {type(error).__name__}: {error}"
        for ledger in world.ledgers.values():
            ledger.facts.unseen.append(message[:300])
            ledger.facts.failed_rules += codes
        return []
