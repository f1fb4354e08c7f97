# SPDX-License-Identifier: Apache-2.0
"""`gather`: the rows of every rank, with gradient; `rank_slice`: which of them are this rank's.

A rank's loss has a gradient for rows of other ranks, which has to reach those ranks. The adjoint of
gathering is to sum the gradients that all ranks have for a row, on the rank that brought it (a
reduce-scatter). Averaging gradients over ranks (as DDP does) then gives the gradient of the mean of
the ranks' losses, so no world-size factor is needed.

Rejected: to keep only the local slice of the gradient and multiply the loss by the world size.
That is right for the encoder, and makes the gradient of everything else that the loss holds (a
temperature, a head) that many times too large. ``backward="replicated"`` puts the factor where
it belongs, on the slice, and needs one loss on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from lockstep.collectives.backward_agreement import BackwardCheck
from lockstep.collectives.call_preconditions import group_for_call, has_no_samples
from lockstep.collectives.row_agreement import agree_on_rows
from lockstep.compiler_disable import disable_dynamo
from lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from lockstep.collectives.row_agreement import RowLayout
    from lockstep.group import Group

_UNEVEN = ("pad", "error")
_BACKWARD = ("adjoint", "replicated")


@disable_dynamo
def gather(
    x: torch.Tensor,
    *,
    dim: int = 0,
    group: Any = None,
    uneven: Literal["pad", "error"] = "pad",
    backward: Literal["adjoint", "replicated"] = "adjoint",
) -> torch.Tensor:
    """The rows of every rank, by rank, with gradient. The loss needs no factor of the world size.

    Args:
        x: this rank's rows, of 1 to 8 dimensions; float64, float32, bfloat16 or float16. Only
            their number may differ between ranks, down to none.
        dim: the dimension along which rows are counted.
        group: a `Group`, a process group, or None for the trainer's or the world group.
        uneven: "error" refuses ranks with different numbers of rows.
        backward: "adjoint" is right for every loss. "replicated" saves the payload of the
            backward, and is right if all ranks compute one and the same loss from the gathered
            rows; otherwise it is refused in backward.

    Returns:
        All rows, shape of `x` but for `dim`. A rank that has no samples in this step, and computes
        on another rank's batch with weight 0, brings none. If all rows are fewer than that batch
        has, that rank sees them repeated, so that each row of its batch has a place; if there are
        none, as where no rank of a subgroup has samples, it sees those of that batch.

    Gradient:
        adjoint: d(sum over ranks of the losses)/d(this rank's rows). replicated: this rank's
        part of d(its loss)/d(all rows), times the number of ranks (by weights).

    Collective:
        Every rank of `group`, in the same order. Blocks. Forward: one small all-gather, one
        all-gather. Backward: one monitored all-gather, and for "adjoint" one
        reduce-scatter.

    Raises:
        RowsDifferError: the ranks' tensors do not fit together; raised on all ranks, before
            any of them moves.
        WrongTypeError: integers, booleans, complex numbers or a scalar on any rank.
        PerShardLossError: in an operator whose loss is computed shard by shard.
        WrongUseError: there is no process group; or a second differentiation.
        CrossedWeightsError, LossesDifferError, PeerLostError: in backward.
    """
    name = "lockstep.gather(x)"
    _require_known("uneven", uneven, _UNEVEN)
    _require_known("backward", backward, _BACKWARD)
    ranks = group_for_call(name, group)
    settings = [dim, uneven, backward]
    layout = agree_on_rows(ranks, name, [x], dim=dim, uneven=uneven, settings=settings)
    if ranks.size == 1 or layout.total == 0:
        return x.clone()  # as from several ranks: what the caller writes to it does not change `x`
    held = x.movedim(dim, 0)
    mine = held[:0] if has_no_samples() else held
    communication = None
    if x.requires_grad and torch.is_grad_enabled():
        communication = BackwardCheck(name, ranks, layout, returns_rows=True)
    apply: Any = _Gather.apply
    rows: torch.Tensor = apply(mine, ranks, layout, communication, backward)
    if len(mine) < len(held) and layout.total < len(held):
        rows = rows[torch.arange(len(held), device=rows.device) % layout.total]
    return rows.movedim(0, dim)


@disable_dynamo
def rank_slice(x: torch.Tensor, *, dim: int = 0, group: Any = None) -> slice:
    """The place of this rank's rows in ``gather(x)``; for labels, and to pick one's own.

    ::

        everyone = lockstep.gather(rows)
        own = everyone[lockstep.rank_slice(rows)]

    Args:
        x: this rank's rows, of any dtype (labels too): only their number matters.
        dim: the dimension along which rows are counted.
        group: a `Group`, a process group, or None for the trainer's or the world group.

    Returns:
        As many places as `x` has rows, also on a rank that has no samples in this step and computes
        on another rank's batch: the first ones, and what it computes with them has weight 0.

    Gradient:
        None.

    Collective:
        Every rank of `group`, same order. Blocks. One small all-gather.

    Raises:
        RowsDifferError: another dtype, or number of dimensions or columns, on some ranks; raised on
            all ranks.
        WrongTypeError: a scalar on any rank.
        PerShardLossError, WrongUseError: as `gather`.
    """
    name = "lockstep.rank_slice(x)"
    ranks = group_for_call(name, group)
    # Nothing travels but the number: values and a gradient do not matter.
    counted = torch.empty(x.shape, dtype=x.dtype, device="meta")
    place = agree_on_rows(ranks, name, [counted], dim=dim, settings=[dim]).span(ranks.rank)
    return slice(0, x.shape[dim]) if has_no_samples() else place


class _Gather(torch.autograd.Function):
    """Rows along dimension 0."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        group: Group,
        layout: RowLayout,
        communication: BackwardCheck | None,
        backward: str,
    ) -> torch.Tensor:
        ctx.communication, ctx.backward, ctx.dtype = communication, backward, rows.dtype
        return all_rows(group, layout, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        communication: BackwardCheck = ctx.communication
        rank = communication.group.rank
        replicated = ctx.backward == "replicated"
        infos = communication.exchange_backward_info(ctx, gradient, one_loss=replicated)
        weight = infos[rank].weight
        if replicated:
            # The loss is the same on all ranks, so the other slices are equal up to their weights.
            factor = sum(one.weight for one in infos) / weight if weight else 0.0
            mine = gradient[communication.layout.span(rank)] * factor
        else:
            # The gradient of a batch with weight zero may be NaN, and must not travel.
            sent = gradient if weight else torch.zeros_like(gradient)
            mine = sum_of_own_rows(communication.group, communication.layout, sent)
        return mine.to(ctx.dtype), None, None, None, None


def all_rows(group: Group, layout: RowLayout, rows: torch.Tensor) -> torch.Tensor:
    """Every rank's rows along dimension 0, by rank; uneven ones travel padded.

    Gradient:
        None: `sum_of_own_rows` is its adjoint.

    Collective:
        Every rank. Blocks. One all-gather.
    """
    rows = rows.detach().contiguous()
    longest = layout.longest
    if not layout.is_even:
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        rows = padded
    gathered = rows.new_empty(group.size * longest, *rows.shape[1:])
    group.all_gather_into(gathered, rows)
    if layout.is_even:
        return gathered
    return torch.cat(
        [
            gathered[rank * longest : rank * longest + count]
            for rank, count in enumerate(layout.counts)
        ]
    )


def sum_of_own_rows(group: Group, layout: RowLayout, rows: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of their gradients of this rank's rows; adjoint of `all_rows`.

    16-bit numbers are added as float32.

    Gradient:
        Not differentiable: the function is the backward of `all_rows`.

    Collective:
        Every rank. Blocks. One reduce-scatter.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    rows = rows.detach().to(dtype).contiguous()
    longest = layout.longest
    if not layout.is_even:
        padded = rows.new_zeros(group.size * longest, *rows.shape[1:])
        for rank, count in enumerate(layout.counts):
            padded[rank * longest : rank * longest + count] = rows[layout.span(rank)]
        rows = padded
    received = rows.new_empty(longest, *rows.shape[1:])
    group.reduce_scatter(received, rows)
    return received[: layout.counts[group.rank]]


def _require_known(argument: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigurationError(
            f"gather has no {argument}={value!r}",
            expected=" or ".join(f'"{name}"' for name in known),
        )
