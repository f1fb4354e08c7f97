# SPDX-License-Identifier: Apache-2.0
"""References to parameters in what an optimizer keeps beside its groups and its state.

Optimizers choose among parameters by identity: ``id(p) in self.decayed``, ``p in self.matrices``,
``self.rates[p]``. Where a step is given other objects in the place of the parameters, as shards or
at a parameter server, the same choice has to be made among those.

What refers to parameters outside of the optimizer's attributes (a closure, a global set) stays.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.sync.optimizer_inspection import own_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.optim import Optimizer

    Replace = Callable[[Any], Any]

_MOST_DEEP: Final = 6
"""How many containers within each other are searched."""


def by_object(new_of: Mapping[int, Any]) -> Replace:
    """A function from parameters, and from their ids, to those of others.

    Args:
        new_of: other parameters by the ids of those whose places they take.
    """

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return new_of.get(id(leaf), leaf)
        return by_id(leaf)

    by_id = by_number(new_of)
    return replace


def by_number(new_of: Mapping[int, Any]) -> Replace:
    """A function from the ids of parameters, maybe of another process, to those of others."""
    return lambda leaf: id(new_of[leaf]) if type(leaf) is int and leaf in new_of else leaf


def replaced(value: Any, replace: Replace, depth: int = _MOST_DEEP) -> Any:
    """`value` with ``replace(leaf)`` in its containers, keys of dicts included.

    The very object, if that changes nothing.
    """
    if depth == 0:
        return value
    if isinstance(value, dict):
        before = [each for pair in value.items() for each in pair]
    elif isinstance(value, list | tuple | set | frozenset):
        before = list(value)
    else:
        return replace(value)
    now = [replaced(each, replace, depth - 1) for each in before]
    if all(one is other for one, other in zip(before, now, strict=True)):
        return value
    if isinstance(value, dict):
        twin = copy.copy(value)  # of its own class, with its factory
        twin.clear()
        twin.update(zip(now[::2], now[1::2], strict=True))
        return twin
    return type(value)(*now) if hasattr(value, "_fields") else type(value)(now)


def replace_in_attributes(optimizer: Optimizer, replace: Replace) -> None:
    """Let the own attributes of `optimizer` refer to other parameters, from now on."""
    for name, value in own_attributes(optimizer).items():
        if (new := replaced(value, replace)) is not value:
            vars(optimizer)[name] = written_into(value, new)


class SwappedReferences:
    """The attributes of optimizers that refer to other parameters for the time of a step."""

    def __init__(self) -> None:
        self._swapped: dict[tuple[int, str], tuple[Any, Any]] = {}

    def swap_in(self, optimizers: Iterable[Optimizer], replace: Replace) -> None:
        """Let the own attributes of `optimizers` refer to other parameters."""
        for optimizer in optimizers:
            for name, value in own_attributes(optimizer).items():
                if (new := replaced(value, replace)) is not value:
                    vars(optimizer)[name] = new
                    self._swapped[id(optimizer), name] = value, new

    def swap_out(self, optimizers: Iterable[Optimizer], replace: Replace) -> None:
        """Let them refer to the former parameters, with what the step has changed in them."""
        for optimizer in optimizers:
            for name, value in own_attributes(optimizer).items():
                back = replaced(value, replace)
                before, swapped = self._swapped.get((id(optimizer), name), (None, None))
                if swapped is not None and value is swapped:
                    back = written_into(before, back)
                if back is not value:
                    vars(optimizer)[name] = back
        self._swapped.clear()


def written_into(container: Any, content: Any) -> Any:
    """`container` with another content, for a program may hold it; `content` if it is fixed."""
    if isinstance(container, dict | set):
        container.clear()
        container.update(content)
        return container
    if isinstance(container, list):
        container[:] = content
        return container
    return content
