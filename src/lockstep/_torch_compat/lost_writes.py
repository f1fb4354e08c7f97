# SPDX-License-Identifier: Apache-2.0
"""Finds writes to a part of a ``DTensor`` that is a copy, where torch has a view of a tensor.

A slice along the sharded dimension (``p[0]``, ``p.chunk(3)``) is gathered from all ranks. What an
optimizer writes to it reaches nobody. Torch 2.13.

A copy is kept until the end, for its version is all that tells of a write. An optimizer that reads
such parts so needs memory for them, for the time of its step.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor import DTensor

from lockstep._torch_compat import storage_key, version_of
from lockstep._torch_compat.shard_operations import as_torch_has_it, replace_operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_aten: Any = torch.ops.aten

_VIEWS: Final = (
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.diagonal.default,
    _aten.unfold.default,
)
"""Views that may have to gather what they are of. All others are of the same rows."""

_DETACH: Final = (_aten.detach.default,)
"""What ``tensor.data`` calls; its result has a version of its own."""


@contextmanager
def find_lost_writes(error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise at the end if something was written to a copy of a part of a ``DTensor``.

    Args:
        error: makes the exception, of the name of the operation that made the copy.
    """
    copies: list[tuple[Any, int, str]] = []

    def view(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with as_torch_has_it(operation):
            result = operation(*args, **kwargs)
        whole = args[0]._local_tensor
        for part in result if isinstance(result, list | tuple) else [result]:
            if isinstance(part, DTensor) and (
                storage_key(part._local_tensor) != storage_key(whole) or is_copy(args[0])
            ):
                copies.append((part, version_of(part), operation.overloadpacket.__name__))
        return result

    def detach(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with as_torch_has_it(operation):
            result = operation(*args, **kwargs)
        if is_copy(args[0]):
            copies.append((result, version_of(result), "data"))
        return result

    def is_copy(tensor: Any) -> bool:
        place = storage_key(tensor._local_tensor)
        return any(place == storage_key(copy._local_tensor) for copy, _, _ in copies)

    with replace_operations(_VIEWS, view), replace_operations(_DETACH, detach):
        yield
    for copy, version, name in copies:
        if version_of(copy) != version:
            raise error(name)
