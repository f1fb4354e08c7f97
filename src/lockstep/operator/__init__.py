# SPDX-License-Identifier: Apache-2.0
"""What the user writes, and the loops of an operator that brings none of its own."""

from lockstep.operator.override_decorator import override
from lockstep.operator.rank_context import Options, RankContext
from lockstep.operator.training_operator import TrainingOperator

__all__ = ["Options", "RankContext", "TrainingOperator", "override"]
