# SPDX-License-Identifier: Apache-2.0
"""`copy_models`: deep copies of models, also of those with tensors that torch refuses to copy."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep._torch_compat import MODULE_TABLES
from lockstep.tensor_tree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def copy_models(models: Sequence[nn.Module], device: torch.device) -> list[nn.Module]:
    """Copies of `models` on `device`; tensors that models share, their copies share, too."""
    copies: list[nn.Module] = []
    memo: dict[int, Any] = {}
    for model in models:
        for parameter in model.parameters():
            moved = parameter.detach().to(device, copy=True)
            memo[id(parameter)] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = buffer.detach().to(device, copy=True)
        for tensor in _tensor_attributes(model):
            memo.setdefault(id(tensor), tensor.detach().to(device, copy=True))
    for model in models:
        copies.append(copy.deepcopy(model, memo))
    return copies


def _tensor_attributes(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that a forward left on its modules (an auxiliary loss, hidden states).

    They hang on the graph of the last step, and torch refuses to copy such tensors.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in MODULE_TABLES:
                yield from tensors_in(value)
