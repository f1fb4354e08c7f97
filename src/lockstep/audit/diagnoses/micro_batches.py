# SPDX-License-Identifier: Apache-2.0
"""Which of a step's backwards were used: the last one alone, where the step accumulates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep.audit.expectation import is_near, main_weight
from lockstep.audit.rules.base import Code

if TYPE_CHECKING:
    from lockstep.audit.diagnoses.seen import Seen
    from lockstep.audit.finding import Finding

CLEARED: Final = Code("LS118", "gradients were cleared before a step used them")


def of_the_last_alone(seen: Seen) -> Finding | None:
    """Each loss was divided by the number of backwards, and all but each rank's last are lost.

    A program may do without an earlier gradient on purpose. It does not divide the loss then, or
    runs the backward at another line.
    """
    each = seen.backwards_per_rank
    last = {column.rank: column.backward for column in seen.columns}
    used = ["shared" if c.backward == last[c.rank] else "lost" for c in seen.columns]
    if each < 2 or seen.uses != used:
        return None
    if any(backward.where != seen.backwards[0].where for backward in seen.backwards):
        return None
    if not all(is_near(main_weight(backward), 1.0 / each) for backward in seen.backwards):
        return None
    return seen.finding(
        CLEARED,
        f"a step has {each:g} backwards, each of a loss that is divided by {each:g}, and the last "
        f"one's gradients{seen.of} alone were used: those of the other micro-batches are lost, and "
        f"the step is {1.0 / each:.3g} of what it would be",
        "call `optimizer.zero_grad()` once a step, after `optimizer.step()`, and not before each "
        "micro-batch",
        evidence={"backwards": each, "ratio": 1.0 / each},
        where=[*seen.backwards[-1].where, *next(iter(seen.steps.values())).where],
    )
