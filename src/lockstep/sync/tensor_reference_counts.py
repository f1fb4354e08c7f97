# SPDX-License-Identifier: Apache-2.0
"""Counts of references to a tensor: lockstep does not write to memory to which others refer.

The functions count references from Python (a list of gradients), from C++ (a graph that has saved
the tensor for its backward) and to the memory (a view, ``.detach()``, a numpy array). The counts of
a tensor with a single holder are measured, not known: they are details of CPython and torch.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

import torch

from lockstep._torch_compat import is_view, storage_use_count, use_count

if TYPE_CHECKING:
    from collections.abc import Sequence


def python_references(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the number of references from Python objects."""
    return list(map(sys.getrefcount, tensors))


def cpp_references(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the references from C++: a ``grad``, graphs, one for its Python object."""
    return list(map(use_count, tensors))


def are_all_fresh(grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether autograd made every gradient, and only its parameter (and `grads`) holds it."""
    python, cpp = _counts_of_fresh()
    try:
        return not (
            any(map(is_view, grads))
            or max(map(sys.getrefcount, grads)) > python
            or max(map(use_count, grads)) > cpp
        )
    except TypeError:
        return False  # a None among them: a look at each one would cost more than all of this


def fresh_flags(grads: Sequence[torch.Tensor | None]) -> list[bool]:
    """`are_all_fresh`, for each gradient by itself."""
    python, cpp = _counts_of_fresh()
    counts = list(map(sys.getrefcount, grads))
    return [
        grad is not None and not is_view(grad) and count <= python and use_count(grad) <= cpp
        for grad, count in zip(grads, counts, strict=True)
    ]


def is_in_graph(tensor: torch.Tensor) -> bool:
    """Whether a graph has saved `tensor` for its backward (or it is a parameter's gradient)."""
    return use_count(tensor) > _counts_of_lone()[0]


def has_aliases(tensor: torch.Tensor) -> bool:
    """Whether other tensors share the memory of `tensor`."""
    return storage_use_count(tensor) > _counts_of_lone()[1]


@cache
def _counts_of_lone() -> tuple[int, int]:
    tensor = torch.zeros((), device="cpu")
    return use_count(tensor), storage_use_count(tensor)


@cache
def _counts_of_fresh() -> tuple[int, int]:
    param = torch.zeros((), device="cpu", requires_grad=True)
    param.grad = torch.zeros((), device="cpu")
    grads = [param.grad]
    return next(map(sys.getrefcount, grads)), next(map(use_count, grads))
