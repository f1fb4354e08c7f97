# SPDX-License-Identifier: Apache-2.0
"""The tensors of a batch, and what stands for it and for each of its rows."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lockstep.audit.fingerprint import take

if TYPE_CHECKING:
    from collections.abc import Iterable

BATCHES: Final = 64
"""Of one iteration over a loader, at most."""
ROWS: Final = 256
"""Samples that are told from others, at most: of a loader, or of a batch made by hand."""
_ELEMENTS: Final = 256
"""Of a row, at most, when it is told from others."""
_MAX_DEPTH: Final = 4
"""Levels of nested objects that are searched for a batch's contents."""
_OF_A_BATCH: Final = 4096
"""Elements of each of its tensors, about."""


def read_on(before: int, tensor: torch.Tensor) -> int:
    """Hash some elements in their order: a batch of images takes as long as a small step."""
    if tensor.layout is not torch.strided:
        return before ^ hash_of([tensor])
    step = max(1, tensor.numel() // _OF_A_BATCH)
    return zlib.crc32(_numbers(_each(tensor.detach(), step, 0)).tobytes(), before)


def hash_of(tensors: list[torch.Tensor]) -> int:
    """Of all elements, of whatever kind they are."""
    return zlib.crc32(take(tensors, [0] * len(tensors), norms=False).hashes.tobytes())


def each_row(tensor: torch.Tensor) -> list[int]:
    """A hash of some elements of each row."""
    step = max(1, math.prod(tensor.shape[1:]) // _ELEMENTS)
    few = _each(tensor.detach(), step, 1)
    return [zlib.crc32(_unpadded(row).tobytes()) for row in _numbers(few)]


def _each(tensor: torch.Tensor, step: int, dim: int) -> torch.Tensor:
    """Every so manieth element in their order, of the dimensions from `dim` on as one.

    A tensor that does not lie in this order is not copied for it.
    """
    if step == 1 or tensor.is_contiguous():
        return tensor.reshape(*tensor.shape[:dim], -1)[..., ::step]
    inner = tensor.shape[dim:]
    places = torch.arange(0, math.prod(inner), step, device=tensor.device)
    return tensor[(slice(None),) * dim + torch.unravel_index(places, inner)]


def _unpadded(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One of the last equal elements: the same sample is padded to another length elsewhere."""
    other = np.flatnonzero(row != row[-1:])
    return row[: int(other[-1]) + 2] if len(other) else row[:1]


def _numbers(few: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy: memory that numpy has seen cannot be resized any more, and it is the program's."""
    if few.is_complex():
        few = torch.view_as_real(few.resolve_conj())
    kind = torch.int64 if few.dtype is torch.int64 else torch.float64
    numbers: np.ndarray[Any, Any] = few.to("cpu", kind, copy=True).numpy()
    return numbers


def tensors_in(batch: Any, most: int) -> list[torch.Tensor]:
    """The first tensors of a batch, however it is nested."""
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.numel() else []
    found: list[torch.Tensor] = []
    for part in _parts(batch):
        if len(found) < most:
            found.extend(tensors_in(part, most - len(found)))
    return found


def tensors_or_contents(batch: Any, most: int) -> list[torch.Tensor]:
    """Tensors that stand for what a batch holds: its own, or else what is in its objects.

    Graphs are objects with tensors as attributes, texts are lists of strings, and a function that
    collates may leave arrays as they are.
    """
    return tensors_in(batch, most) or _contents_of(batch, most, _MAX_DEPTH)


def _contents_of(value: Any, most: int, depth: int) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.numel() else []
    if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "biuf":
        few = value.reshape(-1)[:: max(1, value.size // _OF_A_BATCH)]
        return [torch.from_numpy(few.astype(np.float64))]
    if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        return [torch.tensor([zlib.crc32(each.encode()) for each in value], device="cpu")]
    found: list[torch.Tensor] = []
    for part in (_parts(value) or _attributes_of(value)) if depth else ():
        if len(found) < most:
            found.extend(_contents_of(part, most - len(found), depth - 1))
    return found


def _attributes_of(value: Any) -> Iterable[Any]:
    is_program = isinstance(value, type | torch.nn.Module | ModuleType) or callable(value)
    # `__dict__` and not `getattr`: a property may run the program's code.
    return () if is_program else list(getattr(value, "__dict__", {}).values())


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return vars(batch).values()
    return batch if isinstance(batch, list | tuple) else ()
