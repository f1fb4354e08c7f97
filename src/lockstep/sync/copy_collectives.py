# SPDX-License-Identifier: Apache-2.0
"""Torch's collectives among the ranks of one of several copies of a model, over the run's group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from lockstep._torch_compat.fully_shard import finished_work
from lockstep.errors import NotAvailableError

if TYPE_CHECKING:
    from lockstep.sync.mesh_collectives import MeshCollectives

_Reduction = Callable[[torch.Tensor], torch.Tensor]

_REDUCTIONS: Final[dict[Any, _Reduction]] = {
    dist.ReduceOp.SUM: lambda parts: parts.sum(0),
    dist.ReduceOp.AVG: lambda parts: parts.mean(0),
    dist.ReduceOp.PRODUCT: lambda parts: parts.prod(0),
    dist.ReduceOp.MAX: lambda parts: parts.amax(0),
    dist.ReduceOp.MIN: lambda parts: parts.amin(0),
}


def run_in_copy(collectives: MeshCollectives, name: str, arguments: tuple[Any, ...]) -> Any:
    """Run what DTensor asks of the group of a copy: norms, whole tensors, rows of sums.

    Args:
        name: of a method of torch's process groups.
        arguments: of the method.

    Returns:
        A ``Work`` that is done.

    Collective:
        Every rank of the run's group, of whichever copy.

    Raises:
        NotAvailableError: another collective.
        PeerLostError: a rank went away.
    """
    if name == "allreduce":
        tensors, options = arguments
        for tensor in tensors:
            _all_reduce(collectives, tensor, _reduction(options))
        return finished_work(tensors)
    if name in _ON_PAIRS:
        outputs, inputs, *rest = arguments
        pairs = (
            [(outputs, inputs)]
            if isinstance(outputs, torch.Tensor)
            else zip(outputs, inputs, strict=True)
        )
        for received, sent in pairs:
            _ON_PAIRS[name](collectives, received, sent.contiguous(), *rest)
        return finished_work(outputs)
    raise _not_available(f"torch's {name}")


def _all_gather(
    collectives: MeshCollectives, gathered: torch.Tensor, mine: torch.Tensor, *_: Any
) -> None:
    collectives.all_gather_into(gathered, mine)


def _all_reduce(collectives: MeshCollectives, tensor: torch.Tensor, reduction: _Reduction) -> None:
    parts = tensor.new_empty(collectives.mesh.shard_size, tensor.numel())
    collectives.all_gather_into(parts.view(-1), tensor.contiguous().view(-1))
    tensor.copy_(reduction(parts).view_as(tensor))


def _reduce_scatter(
    collectives: MeshCollectives, received: torch.Tensor, sent: torch.Tensor, options: Any
) -> None:
    reduction = _reduction(options)
    received.copy_(reduction(collectives.exchange_parts(sent)).view_as(received))


_ON_PAIRS: Final[dict[str, Callable[..., None]]] = {
    "_allgather_base": _all_gather,
    "all_gather_single": _all_gather,
    "allgather_into_tensor_coalesced": _all_gather,
    "_reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
}
"""By the name of the method: what is done with each tensor for a result and what is sent for it."""


def _reduction(options: Any) -> _Reduction:
    operation = options.reduceOp
    found = next((function for each, function in _REDUCTIONS.items() if operation == each), None)
    if found is None:
        raise _not_available(f"a reduction by {operation!r}")
    return found


def _not_available(what: str) -> NotAvailableError:
    return NotAvailableError(
        f"{what} is not available among the ranks of one copy of a model",
        got="register(dp_shard_size=...)",
        cause="DTensor was asked for something else than norms, whole tensors or rows of sums",
        fix="leave dp_shard_size out: one copy is then sharded over all ranks",
    )
