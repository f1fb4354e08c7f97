# SPDX-License-Identifier: Apache-2.0
"""Deep copies of models and of their attributes, also with tensors that torch refuses to copy."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from lockstep._torch_compat import MODULE_TABLES, is_set_by_fully_shard
from lockstep.tensor_tree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module())) - {"training"}


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
        for tensor in _tensor_attributes(model.modules()):
            memo.setdefault(id(tensor), tensor.detach().to(device, copy=True))
    for model in models:
        copies.append(copy.deepcopy(model, memo))
    return copies


def copy_attributes(
    copies: Mapping[nn.Module, nn.Module], tensors: Mapping[int, torch.Tensor]
) -> None:
    """Give copies of sharded modules, on the CPU, the attributes that the modules have by now.

    Args:
        copies: that of each module.
        tensors: the copies of parameters and buffers, by the `id` of what they are copies of.
    """
    memo: dict[int, Any] = {**tensors, **{id(module): each for module, each in copies.items()}}
    for tensor in _tensor_attributes(copies):
        # Of what a forward has kept of its gathered weights, the memory is free by now.
        is_freed = tensor.numel() > 0 and not tensor.untyped_storage().size()
        place = torch.device("meta" if is_freed else "cpu")
        memo.setdefault(id(tensor), tensor.detach().to(place, copy=True))
    for module, its_copy in copies.items():
        state: Mapping[str, Any] = module.__getstate__()  # without what no copy is to have
        own = {
            name: value
            for name, value in state.items()
            if name not in _OF_EVERY_MODULE and not is_set_by_fully_shard(name)
        }
        vars(its_copy).update(copy.deepcopy(own, memo))


def _tensor_attributes(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Tensors that a forward left on its modules (an auxiliary loss, hidden states).

    They hang on the graph of the last step, and torch refuses to copy such tensors.
    """
    for module in modules:
        for name, value in vars(module).items():
            if name not in MODULE_TABLES:
                yield from tensors_in(value)
