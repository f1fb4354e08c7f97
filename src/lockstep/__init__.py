# SPDX-License-Identifier: Apache-2.0
"""N workers train one PyTorch model, and no gradient is ever silently wrong."""

from lockstep.data import shard_loader
from lockstep.errors import LockstepError
from lockstep.operator import TrainingOperator
from lockstep.sync import GradientSync, average_gradients, local, replicate
from lockstep.trainer import Callback, TorchTrainer

__all__ = [
    "Callback",
    "GradientSync",
    "LockstepError",
    "TorchTrainer",
    "TrainingOperator",
    "average_gradients",
    "local",
    "replicate",
    "shard_loader",
]
