# SPDX-License-Identifier: Apache-2.0
"""`AttributesCopy`: copies of what an optimizer keeps in attributes of its own.

Lookahead counts its steps in ``self.n`` and keeps its slow weights in ``self.slow``; no
``state_dict`` of torch's holds these. A step that is made again has to find them as they were.

Numbers and tensors are copied, also within lists, dicts, sets and dataclasses, and are written
into the very containers and tensors, which a program may hold as well. All other objects (modules,
functions, optimizers) stay as they are, for a copy of one would no longer belong to the run.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from lockstep.sync.optimizer_inspection import own_attributes
from lockstep.tensor_copies import TensorCopies

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim import Optimizer


class AttributesCopy:
    """The own attributes of one optimizer as they are now.

    Args:
        optimizer: whose attributes.
        states: of all optimizers of the run, which `StateCopy` loads: an attribute that is another
            name for one is that again after a load.
        copied: tensors that are copied elsewhere.
    """

    def __init__(
        self, optimizer: Optimizer, states: Sequence[Optimizer], copied: Iterable[torch.Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._attributes = own_attributes(optimizer)
        self._state_of = {
            name: each
            for name, value in self._attributes.items()
            for each in states
            if value is each.state
        }
        loaded = [container for each in states for container in (each.state, each.param_groups)]
        self._seen = set(map(id, [*copied, *loaded]))
        self._contents: list[tuple[Any, list[Any]]] = []
        self._tensors: list[torch.Tensor] = []
        for value in self._attributes.values():
            self._note(value)
        self._copies = TensorCopies()
        self._copies.take(self._tensors)

    def _note(self, value: Any) -> None:
        """Remember a tensor, or what a container holds."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._tensors.append(value)
            return
        held = content_of(value)
        if held is None:
            return
        if not isinstance(value, tuple | frozenset):
            self._contents.append((value, held))
        for each in held:
            # Of pairs the first is a key, which is what it is.
            self._note(each[1] if isinstance(value, dict) or _has_fields(value) else each)

    def restore(self) -> None:
        """Let the optimizer have the attributes, and these the values, that they had."""
        for name in own_attributes(self._optimizer):
            delattr(self._optimizer, name)
        again = {name: each.state for name, each in self._state_of.items()}
        vars(self._optimizer).update({**self._attributes, **again})
        for container, held in self._contents:
            _write_content(container, held)
        self._copies.restore(self._tensors)


def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def content_of(value: Any) -> list[Any] | None:
    """What a container holds, of dicts and dataclasses as pairs; None where `value` is none."""
    if isinstance(value, dict):
        return list(value.items())
    if _has_fields(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [(name, getattr(value, name)) for name in names]  # without those not set yet
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    return None


def _write_content(container: Any, held: list[Any]) -> None:
    if _has_fields(container):
        now, then = content_of(container) or [], dict(held)
        for name in {name for name, _ in now} - then.keys():
            object.__delattr__(container, name)
        for name, value in held:
            object.__setattr__(container, name, value)  # frozen ones as well
        return
    container.clear()
    if isinstance(container, dict):
        container.update(dict(held))  # of pairs a Counter would count each
    elif isinstance(container, set):
        container.update(held)
    else:
        container.extend(held)
