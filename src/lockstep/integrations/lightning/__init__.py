# SPDX-License-Identifier: Apache-2.0
"""Lightning modules, unchanged, trained by a `TorchTrainer`."""

from lockstep.integrations.lightning.lightning_operator import from_lightning

__all__ = ["from_lightning"]
