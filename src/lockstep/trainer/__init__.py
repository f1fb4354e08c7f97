# SPDX-License-Identifier: Apache-2.0
"""The driver's side: `TorchTrainer`, its arguments, its results, its progress bar."""

from lockstep.trainer.callbacks import Callback
from lockstep.trainer.driver import TorchTrainer

__all__ = ["Callback", "TorchTrainer"]
