# SPDX-License-Identifier: Apache-2.0
"""Replaces operations on ``DTensor``s in which each rank silently goes by its own rows.

Torch 2.6 to 2.14; there is no public way to replace an operation.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor import DTensor

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

_lock = threading.Lock()
_handlers: dict[Any, list[Callable[..., Any]]] = {}
"""By operation: torch's own handler, if there is one, then ours; the last one is in use."""


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

    with _replace(_READS, read):
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

    with _replace(_DRAWS, draw):
        yield


@contextmanager
def _replace(operations: Sequence[Any], handler: Callable[..., Any]) -> Iterator[None]:
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
