# SPDX-License-Identifier: Apache-2.0
"""The hooks that torch calls before a module's forward. Torch 2.6 to 2.13."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def has_forward_pre_hooks(module: nn.Module) -> bool:
    """Whether hooks of its own run before its forward."""
    return bool(module._forward_pre_hooks)
