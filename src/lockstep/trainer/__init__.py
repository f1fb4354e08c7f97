# SPDX-License-Identifier: Apache-2.0
"""The driver's side: `TorchTrainer`, its arguments, its results, its callbacks."""

from lockstep.trainer.callbacks import Callback
from lockstep.trainer.driver import TorchTrainer
from lockstep.trainer.early_stopping import EarlyStopping, KeepBest

__all__ = ["Callback", "EarlyStopping", "KeepBest", "TorchTrainer"]
