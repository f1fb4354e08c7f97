# SPDX-License-Identifier: Apache-2.0
"""The driver: `TorchTrainer`, its arguments, results, callbacks and checkpoints."""

from lockstep.trainer.callbacks import Callback
from lockstep.trainer.early_stopping import EarlyStopping, KeepBest
from lockstep.trainer.torch_trainer import TorchTrainer

__all__ = ["Callback", "EarlyStopping", "KeepBest", "TorchTrainer"]
