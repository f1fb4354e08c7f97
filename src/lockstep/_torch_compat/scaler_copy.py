# SPDX-License-Identifier: Apache-2.0
"""`ScalerCopy`: what a ``GradScaler`` holds, copied without waiting for the device.

Its ``state_dict()`` reads numbers from the device. Torch 2.6 to 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from torch.amp import GradScaler

_SETTINGS: Final = (
    *("_enabled", "_init_scale", "_init_growth_tracker"),
    *("_growth_factor", "_backoff_factor", "_growth_interval"),
)
_INITIAL: Final = {"_scale": "_init_scale", "_growth_tracker": "_init_growth_tracker"}
"""The tensors, None before the first use, and the numbers that they begin with."""


class ScalerCopy:
    """The scale of a `GradScaler` and its settings, as they are now."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        held = vars(scaler)  # one that is not enabled has no scale
        self._settings: dict[str, Any] = {name: held[name] for name in _SETTINGS if name in held}
        self._tensors = {name: _cloned(held.get(name)) for name in _INITIAL}

    def restore(self) -> None:
        """Write the copies over what the scaler has now."""
        held = vars(self._scaler)
        held.update(self._settings)
        for name, value in self._tensors.items():
            tensor = held.get(name)
            if tensor is None:
                continue
            if value is None:
                # Not None again: a scaler without a scale cannot forget what it has unscaled.
                tensor.fill_(self._settings[_INITIAL[name]])
            else:
                tensor.copy_(value)


def _cloned(tensor: Any) -> torch.Tensor | None:
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else None
