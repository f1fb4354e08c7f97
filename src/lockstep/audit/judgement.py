# SPDX-License-Identifier: Apache-2.0
"""All rules over all ledgers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.audit.finding import SEVERITIES, Finding
from lockstep.audit.precedence import without_consequences
from lockstep.audit.program_text.causes import with_causes
from lockstep.audit.rules import RULES
from lockstep.audit.selection import Selection
from lockstep.audit.world import World

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

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
    return sorted(map(with_causes, kept), key=lambda f: (-SEVERITIES.index(f.severity), f.code))


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
