# SPDX-License-Identifier: Apache-2.0
"""References to a tensor: memory to which others refer is not written again.

Counted are references from Python (a list of gradients), from C++ (a graph that has saved the
tensor for its backward) and to the memory (a view, ``.detach()``, a numpy array). The counts of a
tensor with a single holder are measured, not known: they are details of CPython and torch.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_use_count: Final[Callable[[Any], int]] = getattr(torch.Tensor, "_use_count")  # noqa: B009
_is_view: Final[Callable[[Any], bool]] = torch.Tensor._is_view


def from_python(tensors: Sequence[torch.Tensor]) -> list[int]:
    """References to each from Python objects."""
    return list(map(sys.getrefcount, tensors))


def from_cpp(tensors: Sequence[torch.Tensor]) -> list[int]:
    """References to each from C++: a ``grad``, graphs, one for its Python object."""
    return list(map(_use_count, tensors))


def to_memory(tensor: torch.Tensor) -> int:
    """Tensors, and other objects, that lie in its memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def are_fresh(grads: Sequence[torch.Tensor | None]) -> bool:
    """Every gradient is there, autograd made it, and only its parameter (and `grads`) holds it."""
    python, cpp = _fresh()
    try:
        return not (
            any(map(_is_view, grads))
            or max(map(sys.getrefcount, grads)) > python
            or max(map(_use_count, grads)) > cpp
        )
    except TypeError:
        return False  # a None among them: a look at each one would cost more than all of this


def is_fresh(grads: Sequence[torch.Tensor | None]) -> list[bool]:
    """`are_fresh`, for each gradient by itself."""
    python, cpp = _fresh()
    counts = list(map(sys.getrefcount, grads))
    return [
        grad is not None and not grad._is_view() and count <= python and _use_count(grad) <= cpp
        for grad, count in zip(grads, counts, strict=True)
    ]


def is_in_graph(tensor: torch.Tensor) -> bool:
    """A graph has saved it for its backward (or a parameter has it as its gradient)."""
    return _use_count(tensor) > _alone()[0]


def has_aliases(tensor: torch.Tensor) -> bool:
    """Other tensors lie in its memory."""
    return to_memory(tensor) > _alone()[1]


@cache
def _alone() -> tuple[int, int]:
    tensor = torch.zeros((), device="cpu")
    return _use_count(tensor), to_memory(tensor)


@cache
def _fresh() -> tuple[int, int]:
    param = torch.zeros((), device="cpu", requires_grad=True)
    param.grad = torch.zeros((), device="cpu")
    grads = [param.grad]
    return next(map(sys.getrefcount, grads)), next(map(_use_count, grads))
