# SPDX-License-Identifier: Apache-2.0
"""Replaces operations on ``DTensor``s in which each rank silently goes by its own rows.

Torch 2.6 to 2.14; there is no public way to replace an operation.
"""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_aten: Any = torch.ops.aten

_READS: Final = (_aten._local_scalar_dense.default,)

_DRAWS: Final = (
    _aten.normal_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.exponential_.default,
    _aten.geometric_.default,
    _aten.multinomial.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.bernoulli.default,
    _aten.native_dropout.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
)

_DRAWS_OF_A_SHAPE: Final = tuple(
    each
    for each in _DRAWS
    if each
    not in (_aten.multinomial.default, _aten.bernoulli.default, _aten.native_dropout.default)
)
"""Those that read nothing of the tensor but its shape, strides, dtype and device."""

_LARGEST: Final = (
    _aten.max.default,
    _aten.min.default,
    _aten.argmax.default,
    _aten.argmin.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten._foreach_max.default,
)
_NORMS: Final = (
    _aten.linalg_vector_norm.default,
    _aten.norm.Scalar,
    _aten.norm.ScalarOpt_dim,
    _aten._foreach_norm.Scalar,
)

_lock = threading.Lock()
_handlers: dict[Any, list[Callable[..., Any]]] = {}
"""By operation: torch's own handler, if there is one, then ours; the last one is in use."""

_handlers_of_torch: Final = dict(DTensor._op_dispatcher._custom_op_handlers)


@contextmanager
def reduce_scalars_when_read() -> Iterator[None]:
    """Inside, a number that is read of a ``DTensor`` in this process is that of all ranks.

    The norm or the sum of a shard is a ``Partial``, which the next operation reduces that needs it.
    ``item()``, ``float()`` and ``if`` read this rank's part of it instead.

    Collective:
        Each such reading, by every rank of the tensor's mesh, where its ranks have parts.
    """

    def read(operation: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
        return operation(args[0].full_tensor())

    with replace_operations(_READS, read):
        yield


@contextmanager
def refuse_draws(error: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, random numbers are not drawn for a shard.

    On CPUs each rank would draw the same numbers for its rows; on GPUs torch draws others for each,
    which depend on the number of ranks.

    Args:
        error: makes the exception, of the operation's name.
    """

    def draw(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise error(operation.overloadpacket.__name__)

    with replace_operations(_DRAWS, draw):
        yield


@contextmanager
def draw_whole(error: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, the random numbers for a shard are this rank's of those for the whole tensor.

    Each rank draws all of them, from a generator that stands where those of its peers do. What
    draws by the values of a tensor is refused.

    Args:
        error: makes the exception, of the operation's name.
    """

    def draw(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation not in _DRAWS_OF_A_SHAPE:
            raise error(operation.overloadpacket.__name__)
        shard, *rest = args
        like = torch.empty_strided(
            shard.shape, shard.stride(), dtype=shard.dtype, device=shard.device
        )
        whole = operation(like, *rest, **kwargs)
        mesh = shard.device_mesh
        same = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        drawn = same.redistribute(mesh, shard.placements)
        return shard.copy_(drawn) if operation._schema.is_mutable else drawn

    with replace_operations(_DRAWS, draw):
        yield


@contextmanager
def reduce_empty_shards() -> Iterator[None]:
    """Inside, the largest number of a tensor is found as well where some rank has no rows of it.

    That rank's part has no largest number, and it would raise alone, while its peers wait for it.

    Collective:
        Each such operation, by every rank of the tensor's mesh: one all-gather of a tensor that has
        fewer rows than the mesh has ranks, or a few more.
    """

    def reduce(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first, *rest = args
        order = rest[0] if operation in _NORMS and rest else 2
        if operation in _LARGEST or not 0 <= order < math.inf:
            is_list = isinstance(first, list | tuple)
            first = list(map(_without_empty, first)) if is_list else _without_empty(first)
        with as_torch_has_it(operation):
            return operation(first, *rest, **kwargs)

    with replace_operations((*_LARGEST, *_NORMS), reduce):
        yield


def _without_empty(tensor: Any) -> Any:
    """A ``DTensor`` of which each rank has some rows, or all of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            rows, ranks = tensor.shape[placement.dim], mesh.size(axis)
            if -(-rows // ranks) * (ranks - 1) >= rows:  # the first ranks have them all
                return tensor.redistribute(mesh, [Replicate()] * mesh.ndim)
    return tensor


@contextmanager
def as_torch_has_it(operation: Any) -> Iterator[None]:
    """Inside, no handler of ours is in the way of an operation."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    ours = handlers.pop(operation)
    if operation in _handlers_of_torch:
        handlers[operation] = _handlers_of_torch[operation]
    try:
        yield
    finally:
        handlers[operation] = ours


@contextmanager
def replace_operations(operations: Sequence[Any], handler: Callable[..., Any]) -> Iterator[None]:
    """Inside, `handler` is called in the place of ``DTensor``'s operations.

    Args:
        operations: overloads of operators of ``torch.ops.aten``.
        handler: is called with the operation, its arguments and its keyword arguments.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    with _lock:
        for each in operations:
            torchs = [handlers[each]] if each in handlers else []
            _handlers.setdefault(each, torchs).append(handler)
            handlers[each] = handler
    try:
        yield
    finally:
        with _lock:
            for each in operations:
                _handlers[each].remove(handler)
                if left := _handlers[each]:
                    handlers[each] = left[-1]
                else:
                    del handlers[each], _handlers[each]
