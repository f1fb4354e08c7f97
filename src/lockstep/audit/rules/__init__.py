# SPDX-License-Identifier: Apache-2.0
"""The rules, in the order in which they look: what one explains, later ones leave alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep.audit.rules.called_modules import BUFFERS_IN_USE, FROZEN, MODES
from lockstep.audit.rules.clearing import CLEARING
from lockstep.audit.rules.clips import CLIPS
from lockstep.audit.rules.data import DATA
from lockstep.audit.rules.dtypes import DTYPES
from lockstep.audit.rules.gathers import GATHERS
from lockstep.audit.rules.gradients import GRADIENTS, LEFT_OUT
from lockstep.audit.rules.liveness import LIVENESS
from lockstep.audit.rules.mixed import MIXED, OWN_SCALES
from lockstep.audit.rules.norms import NORMS
from lockstep.audit.rules.not_finite import NON_FINITE_STEPS
from lockstep.audit.rules.ownership import OWNERSHIP, PARTICIPATION
from lockstep.audit.rules.partial_outputs import PARTIAL_OUTPUTS
from lockstep.audit.rules.repetition import REPETITION
from lockstep.audit.rules.replicas import REPLICAS, SCALES, STATES, STEP_COUNTS
from lockstep.audit.rules.schedules import SCHEDULES
from lockstep.audit.rules.sharded import SCATTERED, UNHELD, UNREDUCED

if TYPE_CHECKING:
    from lockstep.audit.rules.base import Code, Rule

RULES: Final[tuple[Rule, ...]] = (
    DTYPES,
    OWN_SCALES,
    GRADIENTS,
    CLEARING,
    CLIPS,
    NON_FINITE_STEPS,
    LEFT_OUT,
    MIXED,
    UNREDUCED,
    UNHELD,
    REPLICAS,
    FROZEN,
    STATES,
    SCALES,
    STEP_COUNTS,
    BUFFERS_IN_USE,
    MODES,
    SCATTERED,
    SCHEDULES,
    GATHERS,
    PARTIAL_OUTPUTS,
    NORMS,
    OWNERSHIP,
    PARTICIPATION,
    DATA,
    REPETITION,
    LIVENESS,
)


def all_codes() -> dict[str, Code]:
    """Every code that a finding can have."""
    return {code.code: code for rule in RULES for code in rule.codes}
