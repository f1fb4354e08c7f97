# SPDX-License-Identifier: Apache-2.0
"""Deep copies of models and of their attributes, also with tensors that torch refuses to copy."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from lockstep._torch_compat import (
    MODULE_TABLES,
    buffers_of,
    children_by_key,
    is_persistent,
    is_set_by_fully_shard,
)
from lockstep.sync.replaced_parameters import successor_of
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


def places_of_modules(models: Sequence[nn.Module]) -> dict[nn.Module, tuple[int, str]]:
    """Of each module in `models` the number of its model, and its path in there."""
    return {
        part: (number, path)
        for number, model in enumerate(models)
        for path, part in model.named_modules()
    }


def grow_copies(
    models: Sequence[nn.Module],
    copies: Sequence[nn.Module],
    places: Mapping[nn.Module, tuple[int, str]],
) -> dict[nn.Module, nn.Module]:
    """Let `copies` of models have the submodules that the models have by now.

    Args:
        places: see `places_of_modules`; of the modules that the models had when they were copied.

    Returns:
        The copy of each module; that of one that came later has no tensors and no attributes.
    """
    known = {(n, path): part for part, (n, path) in places_of_modules(copies).items()}
    found: dict[nn.Module, nn.Module] = {}
    for model in models:
        for part in model.modules():
            is_known = places.get(part) in known
            found[part] = known[places[part]] if is_known else _without_tensors(part)
    for part, its_copy in found.items():
        held = children_by_key(its_copy)
        held.clear()
        for key, child in children_by_key(part).items():
            held[key] = None if child is None else found[child]
    return found


def _without_tensors(part: nn.Module) -> nn.Module:
    made: nn.Module = object.__new__(type(part))
    nn.Module.__init__(made)
    for key in buffers_of(part):
        made.register_buffer(key, None, persistent=is_persistent(part, key))
    return made


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
        if (successor := successor_of(tensor)) is not None:
            # Without a copy: a parameter of a module that is none of these.
            elsewhere = torch.empty(tensor.shape, device="meta")
            memo[id(tensor)] = memo.get(id(successor), elsewhere)
            continue
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
