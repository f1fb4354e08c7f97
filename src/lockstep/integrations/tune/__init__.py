# SPDX-License-Identifier: Apache-2.0
"""Ray Tune: `TorchTrainer.as_trainable`, and helpers for trials that are functions."""

from lockstep.integrations.tune.trainable import TorchTrainable, as_trainable
from lockstep.integrations.tune.trial_functions import report, resources, restore

__all__ = ["TorchTrainable", "as_trainable", "report", "resources", "restore"]
