# SPDX-License-Identifier: Apache-2.0
"""`TrainingOperator`, which a user subclasses, and the default training and validation loops."""

from lockstep.operator.override_decorator import override
from lockstep.operator.rank_context import Options, RankContext
from lockstep.operator.training_operator import TrainingOperator

__all__ = ["Options", "RankContext", "TrainingOperator", "override"]
