# SPDX-License-Identifier: Apache-2.0
"""`LeftTensors`: tensors of the graph that replicas leave on the modules of the one model."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep._torch_compat import MODULE_TABLES
from lockstep._torch_compat.forward_hooks import has_forward_pre_hooks
from lockstep.sync.tensor_bits import same_bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Place = tuple[nn.Module, str]
"""A module, and the name of its attribute."""

Tensors = tuple[torch.Tensor, ...]


class LeftTensors:
    """What the calls of a model's replicas, one after the other, leave on its modules.

    A tensor that forward leaves there (a penalty) depends on the rows of one replica: the others'
    are lost. Not so a weight that is computed before each forward from parameters and buffers, by a
    hook: pruning, `weight_norm` and `spectral_norm` of ``torch.nn.utils`` do so. It is known by
    that it was there when the hooks had run, and that all replicas have the same.

    Args:
        module: before the first call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._latest = _graph_tensors_on(module)
        self._computed: dict[Place, Tensors] = {}
        self._computed_now: dict[Place, Tensors] = {}

    @contextmanager
    def noting_computed(self) -> Iterator[None]:
        """Around a call: notes what is there behind the hooks before each module's forward."""

        def note(part: nn.Module, *_: Any) -> None:
            self._computed_now |= _graph_tensors_of(part)

        self._computed_now = {}
        # Behind all hooks that are there already.
        hooked = [part for part in self._module.modules() if has_forward_pre_hooks(part)]
        handles = [part.register_forward_pre_hook(note) for part in hooked]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def find_lost(self) -> str | None:
        """After a call: the name of a tensor that is of this replica's rows alone, if there is."""
        now = _graph_tensors_on(self._module)
        before, self._latest = self._latest, now
        for place, left in now.items():
            if _are_same(before.get(place), left):
                continue
            is_computed = _are_same(self._computed_now.get(place), left)
            first = self._computed.setdefault(place, left)
            if not is_computed or not _have_same_bits(first, left):
                return self._name_of(place)
        return None

    def put_back(self) -> None:
        """After all calls: leave what the first replica has computed, as one model would."""
        for (part, name), tensors in self._computed.items():
            if isinstance(vars(part).get(name), torch.Tensor):
                vars(part)[name] = tensors[0]

    def _name_of(self, place: Place) -> str:
        part, name = place
        path = next(path for path, each in self._module.named_modules() if each is part)
        return f"{path}.{name}".lstrip(".")


def _graph_tensors_on(module: nn.Module) -> dict[Place, Tensors]:
    found: dict[Place, Tensors] = {}
    for part in module.modules():
        found |= _graph_tensors_of(part)
    return found


def _graph_tensors_of(part: nn.Module) -> dict[Place, Tensors]:
    """Tensors of a graph that are attributes of one module, or in a container there."""
    found: dict[Place, Tensors] = {}
    for name, value in vars(part).items():
        if name in MODULE_TABLES:
            continue
        items: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, dict):
            items = value.values()
        tensors = tuple(each for each in items if isinstance(each, torch.Tensor) and each.grad_fn)
        if tensors:
            found[part, name] = tensors
    return found


def _are_same(some: Tensors | None, others: Tensors) -> bool:
    if some is None or len(some) != len(others):
        return False
    return all(one is other for one, other in zip(some, others, strict=True))


def _have_same_bits(some: Tensors, others: Tensors) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(
        same_bits(one.detach(), other.detach().to(one.device)) for one, other in pairs
    )
