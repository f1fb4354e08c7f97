# SPDX-License-Identifier: Apache-2.0
"""`content_digest`: a hash of the content of a tree of tensors, arrays and plain values."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.tensor_tree import PLAIN_TYPES, children_of, is_rows

if TYPE_CHECKING:
    from collections.abc import Callable


def content_digest(value: Any) -> str:
    """A short hash of the content of `value`, equal in every process; 16 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=8)
    _update_hash(value, state.update)
    return state.hexdigest()


def _update_hash(value: Any, update: Callable[[bytes], None]) -> None:
    shape = (getattr(value, "dtype", None), tuple(getattr(value, "shape", ())))
    update(f"{type(value).__name__} {shape}".encode())
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        value = value.detach().cpu().contiguous().view(-1)
        update(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(value.tobytes())
    elif (children := children_of(value)) is not None:
        for key, child in children:
            update(str(key).encode())
            _update_hash(child, update)
    elif isinstance(value, PLAIN_TYPES) or is_rows(value):
        # Of any other object only the type is hashed: its repr may hold a memory address.
        update(repr(value).encode())
