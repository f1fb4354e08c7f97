# SPDX-License-Identifier: Apache-2.0
"""Ray Tune: `TorchTrainer.as_trainable`, and functions for who drives the trainer himself."""

from lockstep.integrations.tune.functions import report, resources, restore
from lockstep.integrations.tune.trainable import TorchTrainable, as_trainable

__all__ = ["TorchTrainable", "as_trainable", "report", "resources", "restore"]
