# SPDX-License-Identifier: Apache-2.0
"""Which of some tensors' values reach what a module returns, through every operation in between.

Seen by the storages that operations read and write: also where a value picks rows, as a router's
bias does, and autograd knows nothing of it. Not through a number that Python reads (``.item()``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OF_ALL_RANKS: Final = ("c10d", "_c10d_functional", "c10d_functional")
_WRITING: Final = ("copy_", "fill_", "zero_")
"""Operations that read nothing of what they write to."""


class Dataflow(TorchDispatchMode):
    """While it is entered, follows the values that `tensors` have on entry.

    A collective's results are taken for the same on all ranks: they follow from none of `tensors`.

    Attributes:
        stores: places of those of `tensors` that were written to a part at a time, as a queue of
            samples is.
    """

    supports_higher_order_operators = True  # torch refuses them under other modes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch compiles as ever: also eager calls, as ``flex_attention``, compile."""
        return True

    def __init__(self, tensors: Sequence[torch.Tensor], guard: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stores: set[int] = set()
        self._guard = guard
        # A weak reference keeps the storage's address from being given to another one.
        self._reached: dict[int, tuple[StorageWeakRef, frozenset[int]]] = {}
        self._own: dict[int, set[int]] = {}
        for place, tensor in enumerate(tensors):
            storage = _storage(tensor)
            if storage is not None:
                self._mark(storage, self._of(storage) | {place})
                self._own.setdefault(storage._cdata, set()).add(place)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        self._guard(self._follow, func, args, given, result)
        return result

    def reaches(self, results: Any) -> set[int]:
        """The places of those tensors whose values reach a tensor in `results` with a gradient."""
        tensors = [t for t in _tensors(results) if t.requires_grad]
        return set().union(*(self._of(_storage(t)) for t in tensors))

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        read, results = _tensors((args, kwargs)), _tensors(result)
        if getattr(func, "namespace", "") in _OF_ALL_RANKS:
            for tensor in (*read, *results):
                self._mark(_storage(tensor), frozenset())
            return
        written = _written(func, args, kwargs)
        overwrites = func.__name__.partition(".")[0] in _WRITING
        sources = [t for t in read if not (overwrites and any(t is w for w in written))]
        reached = frozenset().union(*(self._of(_storage(t)) for t in sources))
        known = {s._cdata for t in read if (s := _storage(t)) is not None}
        for tensor in results:
            storage = _storage(tensor)
            if storage is not None and storage._cdata not in known:
                self._mark(storage, reached)
        for tensor in written:
            storage = _storage(tensor)
            if storage is None:
                continue
            is_whole = tensor.numel() * tensor.element_size() == storage.nbytes()
            if overwrites and not is_whole:
                self.stores |= self._own.get(storage._cdata, set())
            before = frozenset() if overwrites and is_whole else self._of(storage)
            self._mark(storage, before | reached)

    def _of(self, storage: torch.UntypedStorage | None) -> frozenset[int]:
        known = None if storage is None else self._reached.get(storage._cdata)
        return frozenset() if known is None else known[1]

    def _mark(self, storage: torch.UntypedStorage | None, places: frozenset[int]) -> None:
        if storage is None:
            return
        if places:
            self._reached[storage._cdata] = StorageWeakRef(storage), places
        else:
            self._reached.pop(storage._cdata, None)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None where there is none, as of a sparse tensor."""
    if tensor.layout is not torch.strided or not math.prod(tensor.shape):
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What the operation's schema says that it writes to; one of higher order has none."""
    found: list[torch.Tensor] = []
    schema = getattr(func, "_schema", None)
    for place, argument in enumerate(() if schema is None else schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            by_name = kwargs.get(argument.name)
            found += _tensors(args[place] if place < len(args) else by_name)
    return found
