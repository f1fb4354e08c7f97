# SPDX-License-Identifier: Apache-2.0
"""Converts a state to tensors and plain Python values, which can be read without running code.

The rule is a list of exact types. Rejected: every object that pickles; to read one takes the same
class in the same module, and runs its code.

These common types are converted, because a reader misses nothing:

- numpy scalars, and subclasses of int, float, complex, str and bytes (``torch.__version__``),
  become the plain Python value (an Enum is refused: its name would be lost);
- numpy arrays of numbers and bools become tensors (``.numpy()`` gives the array back);
- tensors and parameters become detached CPU tensors. A view of a larger tensor is copied, so that
  the rest of that tensor stays out of the file; tensors that share their whole memory still do.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lockstep._torch_compat import storage_key
from lockstep.errors import CheckpointError, WrongTypeError
from lockstep.local_rows import LocalRows

_ATOMS: Final = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.Size,
    }
)
MAPPINGS: Final = (dict, OrderedDict, Counter)
"""Of these a checkpoint keeps the class; of other mappings it makes dicts."""
_SEQUENCES: Final = (list, tuple, set)
_SUBCLASSED: Final[tuple[type[Any], ...]] = (int, float, complex, bytes)
_TENSORS: Final = (Tensor, torch.nn.Parameter)
_NUMBERS: Final = "biufc"
"""numpy's kinds of dtypes that hold numbers and bools."""
_MAX_INT_BITS: Final = 255 * 8 - 1
"""Longer integers have a pickle code that torch's restricted reader does not know."""


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` as new containers of plain values; CPU tensors share memory with the originals.

    Raises:
        WrongTypeError: `state` is no mapping.
        CheckpointError: a value in it cannot be read back; the message names its key path and type.
    """
    if not isinstance(state, Mapping):
        raise WrongTypeError(
            "a checkpoint holds a dict", expected="a dict", got=type(state).__qualname__
        )
    root: Any = state if type(state) in MAPPINGS else dict(state)
    return _PlainConverter().convert_mapping(root, "state")


class _PlainConverter:
    """Converts one state, and remembers the memory of the tensors that it has converted already."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        # Source and result: the source stays alive, or a new tensor could get the same storage key.
        self._tensors: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def convert(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            if kind is int and value.bit_length() > _MAX_INT_BITS:
                raise _not_plain_error(value, where, fix="store it as text: `str(number)`")
            return value
        if isinstance(value, Tensor):
            return self._convert_tensor(value, where)
        if kind is LocalRows:
            return LocalRows(self._convert_tensor(value.rows, where), value.shape, value.first)
        if kind in MAPPINGS or kind in _SEQUENCES:
            return self._convert_container(value, where)
        if isinstance(value, np.ndarray):
            return _tensor_of_array(value, where)
        return _plain_scalar(value, where)

    def convert_mapping(self, mapping: dict[Any, Any], where: str) -> dict[Any, Any]:
        plain = type(mapping)()
        for key, value in mapping.items():
            plain[_plain_key(key, where)] = self.convert(value, f"{where}[{_quote_key(key)}]")
        # torch recognises old layouts by the attribute `_metadata` of a module's `state_dict()`.
        for name, value in getattr(mapping, "__dict__", {}).items():
            setattr(plain, name, self.convert(value, f"{where}.{name}"))
        return plain

    def _convert_container(self, value: Any, where: str) -> Any:
        if id(value) in self._open:
            raise _not_plain_error(value, where, fix="take the container out of itself")
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return self.convert_mapping(value, where)
            if isinstance(value, set):
                return {_plain_key(item, where) for item in value}
            items = (self.convert(item, f"{where}[{index}]") for index, item in enumerate(value))
            return type(value)(items)
        finally:
            self._open.discard(id(value))

    def _convert_tensor(self, tensor: Tensor, where: str) -> Tensor:
        if type(tensor) not in _TENSORS or tensor.is_nested:
            raise _not_plain_error(
                tensor, where, fix="store a plain tensor (of a DTensor: `.full_tensor()`)"
            )
        if tensor.is_meta:
            raise _not_plain_error(
                tensor, where, fix="give it data: a tensor on `meta` has only a shape"
            )
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.cpu()
        storage = tensor.untyped_storage()
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (storage_key(tensor), tensor.dtype, *place)
        if key not in self._tensors:
            if tensor.numel() * tensor.itemsize < storage.nbytes():
                saved = tensor.clone().cpu()
            else:
                # The storage is moved, so that two tensors of one CUDA storage still share one.
                on_cpu = self._storages.setdefault(storage_key(tensor), storage.cpu())
                saved = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(on_cpu, *place)
            self._tensors[key] = (tensor, saved)
        return self._tensors[key][1]


def _plain_key(key: Any, where: str) -> Any:
    """A dict's key or a set's item as a plain value, which is hashable and compares by value."""
    if type(key) is tuple:
        return tuple(_plain_key(part, where) for part in key)
    if type(key) in _ATOMS:
        return key
    return _plain_scalar(key, f"{where}, key {key!r}")


def _plain_scalar(value: Any, where: str) -> Any:
    """The plain Python value of a numpy scalar or of a subclass of a plain type."""
    if isinstance(value, Enum):
        raise _not_plain_error(value, where, fix="store `.name` or `.value`")
    if isinstance(value, str):
        return str.__str__(value)  # `str(value)` would call a subclass's own `__str__`
    for kind in _SUBCLASSED:
        if isinstance(value, kind):
            return kind(value)
    # Of a time in nanoseconds `item` gives an int, and of a missing one None.
    is_number = isinstance(value, np.generic) and value.dtype.kind in _NUMBERS
    if is_number and type(value.item()) in _ATOMS:
        return value.item()
    raise _not_plain_error(
        value, where, fix="store its parts: numbers, strings, tensors, lists, dicts"
    )


def _tensor_of_array(array: np.ndarray[Any, Any], where: str) -> Tensor:
    native = array.dtype.newbyteorder("=")
    if array.dtype.kind in _NUMBERS:
        with suppress(TypeError):  # torch has no dtype of this width (longdouble, say)
            return torch.from_numpy(np.array(array, dtype=native, order="C", copy=True))
    raise _not_plain_error(
        array, where, fix="store numbers, or `array.tolist()`", note=f" of {array.dtype}"
    )


def _quote_key(key: Any) -> str:
    return json.dumps(key, ensure_ascii=False) if type(key) is str else repr(key)


def _not_plain_error(value: Any, where: str, *, fix: str, note: str = "") -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        f"cannot save {where}: {kind.__qualname__}{note}",
        expected="tensors and plain Python values, which can be read without running code",
        got=f"{kind.__module__}.{kind.__qualname__}{note}",
        fix=fix,
    )
