# SPDX-License-Identifier: Apache-2.0
"""Lightning modules, unchanged, trained by a `TorchTrainer`."""

from lockstep.integrations.lightning.front_door import from_lightning

__all__ = ["from_lightning"]
