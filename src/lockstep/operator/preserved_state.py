# SPDX-License-Identifier: Apache-2.0
"""`preserve_state`: lets a forward run that is to leave nothing behind."""

from __future__ import annotations

import copy
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from lockstep.operator.in_place_writes import has_value, write_back
from lockstep.operator.registration import registered_parts
from lockstep.randomness import preserve_rng_state
from lockstep.sync import buffer_places, copy_buffers, put_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator


_CONTAINERS: Final = (list, dict, set, deque)

_SMALL: Final = 1 << 14

_OF_TORCH: Final = frozenset(vars(nn.Module()))
"""Attributes that each module has: what a forward does to them is no state of the program's."""


@contextmanager
def preserve_state(operator: Any) -> Iterator[None]:
    """Put back afterwards what a forward changes: random numbers, buffers, weights, attributes.

    Of the weights: those that forwards are known to write to.

    Of the attributes of the operator and its modules: what is assigned anew; what lists, dicts,
    sets and deques hold; the values of small tensors, and the states of generators. What lies
    deeper, in objects of the program's own, is not put back.
    """
    modules = [each for root in registered_parts(operator).modules() for each in root.modules()]
    buffers = copy_buffers(buffer_places(modules))
    weights = operator._lockstep.in_place_writes.copy_found()
    attributes = [_Attributes(operator, frozenset())]
    attributes += [_Attributes(module, _OF_TORCH) for module in modules]
    try:
        with preserve_rng_state():
            yield
    finally:
        with torch.no_grad():
            put_buffers(buffers)
            # A graph may have saved a weight: one that is as before is not written.
            write_back({w: value for w, value in weights.items() if not has_value(w, value)})
            for each in attributes:
                each.put_back()
        # A forward without gradients may have left casts of the weights that have no graph.
        torch.clear_autocast_cache()


class _Attributes:
    """The attributes of an object as they are now.

    Args:
        holder: the object.
        ignored: the names of others, which stay as they are.
    """

    def __init__(self, holder: Any, ignored: frozenset[str]) -> None:
        self._holder = holder
        self._ignored = ignored
        self._held = {name: each for name, each in vars(holder).items() if name not in ignored}
        self._contents = [(each, _content_of(each)) for each in self._held.values()]

    def put_back(self) -> None:
        for name in vars(self._holder).keys() - self._held.keys() - self._ignored:
            del vars(self._holder)[name]
        vars(self._holder).update(self._held)
        for held, content in self._contents:
            if isinstance(held, torch.Generator):
                held.set_state(content)
            elif _is_small(held):
                held.data.copy_(content)
            elif isinstance(held, _CONTAINERS):
                held.clear()
                held.extend(content) if isinstance(held, (list, deque)) else held.update(content)


def _content_of(held: Any) -> Any:
    if isinstance(held, torch.Generator):
        return held.get_state()
    if _is_small(held):
        return held.detach().clone()
    return copy.copy(held) if isinstance(held, _CONTAINERS) else None


def _is_small(held: Any) -> bool:
    """Whether `held` is a tensor that may be a count or a mean; a large one may be a dataset."""
    return isinstance(held, torch.Tensor) and held.numel() <= _SMALL
