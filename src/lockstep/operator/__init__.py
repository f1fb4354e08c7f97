# SPDX-License-Identifier: Apache-2.0
"""What the user writes, and the loops of an operator that brings none of its own."""

from lockstep.operator.definition import TrainingOperator
from lockstep.operator.overriding import override
from lockstep.operator.setting import Options, Setting

__all__ = ["Options", "Setting", "TrainingOperator", "override"]
