# SPDX-License-Identifier: Apache-2.0
"""Ray Tune: `TorchTrainer.as_trainable`, and helpers for trials that are functions."""

from lockstep.integrations.tune.function_api import report, resources, restore
from lockstep.integrations.tune.trainable import TorchTrainable, as_trainable

__all__ = ["TorchTrainable", "as_trainable", "report", "resources", "restore"]
