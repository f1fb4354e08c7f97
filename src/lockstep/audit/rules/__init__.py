# SPDX-License-Identifier: Apache-2.0
"""The rules, in the order in which they look: what one explains, later ones leave alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep.audit.rules.called_modules import Buffers, Frozen, Modes
from lockstep.audit.rules.clearing import Clearing
from lockstep.audit.rules.data import Data
from lockstep.audit.rules.dtypes import Dtypes
from lockstep.audit.rules.gathers import Gathers
from lockstep.audit.rules.gradients import Gradients, LeftOut
from lockstep.audit.rules.liveness import Liveness
from lockstep.audit.rules.mixed import Mixed, OwnScales
from lockstep.audit.rules.norms import Norms
from lockstep.audit.rules.not_finite import NotFinite
from lockstep.audit.rules.ownership import Ownership, Participation
from lockstep.audit.rules.partial_outputs import PartialOutputs
from lockstep.audit.rules.repetition import Repetition
from lockstep.audit.rules.replicas import Replicas, Scales, States, StepCounts
from lockstep.audit.rules.schedules import Schedules
from lockstep.audit.rules.sharded import Scattered, Unheld, Unreduced

if TYPE_CHECKING:
    from lockstep.audit.rules.base import Code, Rule

RULES: Final[tuple[Rule, ...]] = (
    Dtypes(),
    OwnScales(),
    Gradients(),
    Clearing(),
    NotFinite(),
    LeftOut(),
    Mixed(),
    Unreduced(),
    Unheld(),
    Replicas(),
    Frozen(),
    States(),
    Scales(),
    StepCounts(),
    Buffers(),
    Modes(),
    Scattered(),
    Schedules(),
    Gathers(),
    PartialOutputs(),
    Norms(),
    Ownership(),
    Participation(),
    Data(),
    Repetition(),
    Liveness(),
)


def all_codes() -> dict[str, Code]:
    """Every code that a finding can have."""
    return {code.code: code for rule in RULES for code in rule.codes}
