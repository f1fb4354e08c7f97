# SPDX-License-Identifier: Apache-2.0
"""References to a tensor: memory to which others refer is not written again.

Counted are references from Python (a list of gradients), from C++ (a graph that has saved the
tensor for its backward) and to the memory (a view, ``.detach()``, a numpy array). The counts of a
tensor with a single holder are measured, not known: they are details of CPython and torch.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

import torch

from lockstep._torch_compat import is_view, storage_use_count, use_count

if TYPE_CHECKING:
    from collections.abc import Sequence


def from_python(tensors: Sequence[torch.Tensor]) -> list[int]:
    """References to each from Python objects."""
    return list(map(sys.getrefcount, tensors))


def from_cpp(tensors: Sequence[torch.Tensor]) -> list[int]:
    """References to each from C++: a ``grad``, graphs, one for its Python object."""
    return list(map(use_count, tensors))


def are_fresh(grads: Sequence[torch.Tensor | None]) -> bool:
    """Every gradient is there, autograd made it, and only its parameter (and `grads`) holds it."""
    python, cpp = _fresh()
    try:
        return not (
            any(map(is_view, grads))
            or max(map(sys.getrefcount, grads)) > python
            or max(map(use_count, grads)) > cpp
        )
    except TypeError:
        return False  # a None among them: a look at each one would cost more than all of this


def is_fresh(grads: Sequence[torch.Tensor | None]) -> list[bool]:
    """`are_fresh`, for each gradient by itself."""
    python, cpp = _fresh()
    counts = list(map(sys.getrefcount, grads))
    return [
        grad is not None and not is_view(grad) and count <= python and use_count(grad) <= cpp
        for grad, count in zip(grads, counts, strict=True)
    ]


def is_in_graph(tensor: torch.Tensor) -> bool:
    """A graph has saved it for its backward (or a parameter has it as its gradient)."""
    return use_count(tensor) > _alone()[0]


def has_aliases(tensor: torch.Tensor) -> bool:
    """Other tensors lie in its memory."""
    return storage_use_count(tensor) > _alone()[1]


@cache
def _alone() -> tuple[int, int]:
    tensor = torch.zeros((), device="cpu")
    return use_count(tensor), storage_use_count(tensor)


@cache
def _fresh() -> tuple[int, int]:
    param = torch.zeros((), device="cpu", requires_grad=True)
    param.grad = torch.zeros((), device="cpu")
    grads = [param.grad]
    return next(map(sys.getrefcount, grads)), next(map(use_count, grads))
