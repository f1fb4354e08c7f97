# SPDX-License-Identifier: Apache-2.0
"""`OptimizerAttributes`: attributes of an optimizer and marks of its parameters, to be sent.

A loop sets what a step reads (``optimizer.scale``, ``param.lr_scale``), and reads what a step
counts. Both the worker and the server have the attributes; what has changed is sent with a step,
and with its answer, as settings of groups are. Each value is a pickle, by which changes are found
too, whatever class it is of. In a pickle, parameters, optimizers, groups and states are references.

Some values are not sent: those that refer to modules or to other optimizers, tensors in the memory
of parameters or states, and what no pickle takes. Of them only another object is a change.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import torch

from lockstep.sync.optimizer_inspection import inner_optimizers, own_attributes, state_tensors
from lockstep.sync.parameter_references import written_into
from lockstep.sync.parameter_server.state_at_server import StateAtServer
from lockstep.tensor_copies import as_bytes, is_block
from lockstep.tensor_tree import PLAIN_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

_OF_TORCH_COMPILE: Final = "_dynamo_"
"""How marks begin that torch sets itself, on each rank when that has compiled its forward."""

Key = tuple[str, int, str]
"""The kind of owner ("optimizer", "parameter"), its place or number, the attribute's name."""

Changes = dict[Key, bytes | None]
"""New values of attributes as pickles; None: the attribute was deleted."""


@dataclass(frozen=True, eq=False)
class NotSent:
    """A value that is not sent; equal to nothing but the same object."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NotSent) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


Packed = dict[Key, bytes | NotSent]


class OptimizerAttributes:
    """The attributes of `optimizer`, of optimizers within it, and the marks of its parameters.

    Args:
        optimizer: at a worker or at the server.
        parameters: those that it holds, by their numbers; the same ones at both.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[int, torch.Tensor]) -> None:
        members = [optimizer, *inner_optimizers(optimizer)]
        self._owners: dict[tuple[str, int], Any] = {
            ("optimizer", place): member for place, member in enumerate(members)
        }
        self._owners |= {("parameter", number): param for number, param in parameters.items()}
        self._objects: dict[Any, Any] = dict(self._owners)
        for place, member in enumerate(members):
            self._objects["state", place] = member.state
            self._objects["defaults", place] = member.defaults
            self._objects["groups", place] = member.param_groups
            for number, group in enumerate(member.param_groups):
                self._objects["group", place, number] = group
                self._objects["params", place, number] = group["params"]
        self._numbers = {id(param): number for number, param in parameters.items()}
        self._parameters = parameters
        self._members = members

    def name_of(self, key: Key) -> str:
        """The attribute, for an error's text."""
        kind, place, name = key
        owner = self._owners[kind, place]
        return f"{type(owner).__name__ if kind == 'optimizer' else 'parameter'}.{name}"

    def pack(self) -> Packed:
        """All attributes and marks as they are now."""
        references = _References(self._references(), self._numbers, self._tensors_with_memory())
        return {
            (kind, place, name): references.pickled(value)
            for (kind, place), owner in self._owners.items()
            for name, value in _attributes_of(owner).items()
        }

    def load(self, data: bytes, device: torch.device | None = None) -> Any:
        """A value that was packed by `pack`, with its tensors on `device`; None: on the CPU."""
        return _Unpickler(io.BytesIO(data), self._objects, self._parameters, device).load()

    def put(self, changes: Changes) -> None:
        """Set attributes to what they were changed to where `changes` comes from.

        A container stays the same object, for a program may hold it.
        """
        first = next(iter(self._parameters.values()), None)
        shared = self._references()
        for (kind, place, name), data in changes.items():
            owned = vars(self._owners[kind, place])
            former = owned.pop(name, None) if data is None else owned.get(name)
            if data is not None:
                nearest = former if isinstance(former, torch.Tensor) else first
                device = None if nearest is None else nearest.device
                value = self.load(data, device)
                is_shared = id(value) in shared or id(former) in shared
                owned[name] = value if is_shared else written_into(former, value)

    def _references(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for reference, each in self._objects.items():
            found.setdefault(id(each), reference)
        return found

    def _tensors_with_memory(self) -> list[torch.Tensor]:
        here = [each for each in self._members if not isinstance(each.state, StateAtServer)]
        return [*self._parameters.values(), *(t for each in here for t in state_tensors(each))]


def changes_between(before: Packed, now: Packed) -> dict[Key, bytes | NotSent | None]:
    """What differs in `now` from what it was `before`."""
    changed = {key: packed for key, packed in now.items() if before.get(key) != packed}
    return {**changed, **dict.fromkeys(before.keys() - now.keys())}


def marks_of(param: torch.Tensor) -> dict[str, Any]:
    """The user's own attributes of a parameter, by which an optimizer may choose.

    Numbers, words and tensors: what refers to modules or processes has no meaning elsewhere.
    """
    kinds = (*PLAIN_TYPES, torch.Tensor)
    return {
        name: each
        for name, each in vars(param).items()
        if isinstance(each, kinds) and not name.startswith(_OF_TORCH_COMPILE)
    }


def _attributes_of(owner: Any) -> dict[str, Any]:
    return marks_of(owner) if isinstance(owner, torch.Tensor) else own_attributes(owner)


class _References:
    """Pickles values with references to the objects that both sides have.

    Args:
        references: of those objects, by their ids.
        numbers: of parameters, by their ids, which are values as well.
        holders: tensors whose memory no pickled tensor may share.
    """

    def __init__(
        self,
        references: Mapping[int, Any],
        numbers: Mapping[int, int],
        holders: list[torch.Tensor],
    ) -> None:
        self._references = references
        self._numbers = numbers
        self._holders = holders
        self._memory: set[int] | None = None

    def pickled(self, value: Any) -> bytes | NotSent:
        with io.BytesIO() as file:
            try:
                _Pickler(file, self).dump(value)
            # Whatever a user's `__reduce__` raises: then it is a value that is not sent.
            except Exception:
                return NotSent(value)
            return file.getvalue()

    def reference(self, value: Any) -> Any:
        """What stands for `value` in a pickle; None: what it is made of.

        Raises:
            PicklingError: it is not sent.
        """
        found = self._references.get(id(value))
        if found is not None:
            return found
        if type(value) is int:
            number = self._numbers.get(value)
            return None if number is None else ("id", number)
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            raise pickle.PicklingError(f"a {type(value).__name__} is not sent")
        if not isinstance(value, torch.Tensor):
            return None
        if not is_block(value) or self._has_memory_of(value):
            raise pickle.PicklingError("such a tensor is not sent")
        # As bytes: torch's own pickle of a tensor differs from one time to the next.
        data = as_bytes(value.detach().cpu()).numpy().tobytes()
        return "tensor", data, value.dtype, tuple(value.shape)

    def _has_memory_of(self, tensor: torch.Tensor) -> bool:
        if self._memory is None:
            holders = [each for each in self._holders if is_block(each)]
            self._memory = {each.untyped_storage().data_ptr() for each in holders}
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._memory


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, references: _References) -> None:
        super().__init__(file)
        self._references = references

    def persistent_id(self, obj: Any) -> Any:
        return self._references.reference(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        objects: Mapping[Any, Any],
        parameters: Mapping[int, torch.Tensor],
        device: torch.device | None,
    ) -> None:
        super().__init__(file)
        self._objects = objects
        self._parameters = parameters
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        kind, *rest = pid
        if kind == "id":
            return id(self._parameters[rest[0]])
        if kind != "tensor":
            return self._objects[pid]
        data, dtype, shape = rest
        if not data:
            return torch.empty(shape, dtype=dtype, device=self._device or "cpu")
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        return flat.view(shape).to(self._device or "cpu")
