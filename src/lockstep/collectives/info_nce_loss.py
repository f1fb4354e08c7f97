# SPDX-License-Identifier: Apache-2.0
"""`info_nce`: the loss of CLIP over the rows of all ranks, without the matrix of all pairs.

A rank owns the rows of S = scale * a @ b.T that are its own rows of `a`, for all columns. The
log sum exp of a row needs only this rank's block; that of a column, two all-reduces of a vector.
So one block serves both directions, only `b` is gathered, and the cost is four products
of (rows here) x (rows everywhere) x D: S, S again in backward, and two gradients. Losses over
local rows that gather both sides need six.

dL/dS of pair (i, j) is (p_ij + q_ij) / 2B, where p and q are the softmax of the row and of the
column, less 1/B at the positive. The temperature's gradient is <a, dL/da> / scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.collectives.contrastive_call import (
    TILE,
    as_tensor,
    compare_arguments,
    gradient_of_scale,
    promote_to_common_dtype,
    upcast,
)
from lockstep.collectives.differentiable_gather import all_rows
from lockstep.collectives.similarity_tiles import (
    LOG2_E,
    Coefficients,
    gradients,
    sums_of_exponentials,
)
from lockstep.compiler_disable import disable_dynamo
from lockstep.group import MAX

if TYPE_CHECKING:
    from lockstep.collectives.contrastive_call import ContrastiveCall, Reduction
    from lockstep.collectives.similarity_tiles import RunningLogSumExp, Tile
    from lockstep.group import Group
    from lockstep.pending_collective import Pending


@disable_dynamo
def info_nce(
    a: torch.Tensor,
    b: torch.Tensor,
    logit_scale: torch.Tensor | float,
    *,
    positives: torch.Tensor | None = None,
    reduction: Reduction = "mean",
    tile: Tile = TILE,
    group: Any = None,
) -> torch.Tensor:
    """Symmetric InfoNCE (the loss of CLIP) over the rows of all ranks, exact and tiled.

    For every pair: half of -log softmax along its row of ``logit_scale * a @ b.T``, and half
    of that along its column; both over the rows of all ranks. Rows are not normalised here.

    Args:
        a: this rank's rows, shape (n, D); their number may differ between ranks, down to none.
        b: this rank's rows, shape (m, D).
        logit_scale: what similarities are multiplied by, 1 / temperature: ``self.scale.exp()``.
        positives: for each row of `a`, the place of its partner among the rows of `b` of all
            ranks (``rank_slice(b).start`` is where this rank's begin), shape (n,). None: the row
            at the same place. Rows of `b` that are nobody's partner are negatives alone.
        reduction: "mean" over all pairs, "sum", or "none" for the losses of this rank's pairs.
        tile: how much of the matrix exists at a time, the same on every rank; changes speed only.
        group: a `Group`, a process group, or None for the trainer's or the world group.

    Returns:
        The global loss, the same scalar on every rank; or shape (n,). 16-bit inputs are
        computed in float32. A rank that has no samples in this step, and computes on another rank's
        batch with weight 0, brings no rows.

    Gradient:
        With g = the sum over ranks of `grad_output`: the gradient of g * loss with respect to this
        rank's rows, and this rank's share of that for `logit_scale`. Right under any
        synchronisation that averages.

    Collective:
        Every rank of `group`, in the same order. Blocks. Forward: one small all-gather, one
        all-gather of `b`, two all-reduces of a vector, one of a number. Backward: one
        monitored all-gather, and the gradient of all `b` in reduces of a tile's width.

    Raises:
        As `gather`; ConfigurationError for shapes and positives that cannot be, and in an
        operator with ``loss_reduction="sum"``.
    """
    name = "lockstep.info_nce(a, b, logit_scale)"
    call = compare_arguments(name, (a, b), logit_scale, positives, reduction, tile, group)
    num_rows = len(a)
    if call.is_empty:
        a, b, positives = a[:0], b[:0], None if positives is None else positives[:0]
    ours = call.rows.span(call.group.rank)
    where = ours if positives is None else positives.to(a.device)
    apply: Any = _InfoNCE.apply
    loss: torch.Tensor = apply(a, b, as_tensor(logit_scale, a), call, where)
    return call.as_of_batch(loss, num_rows)


class _ColumnGradients:
    """Sends the gradient of the columns, part by part, to the rank whose rows the columns are.

    One part travels while the next is computed, so that no rank holds the gradient of all columns.
    """

    def __init__(self, call: ContrastiveCall, like: torch.Tensor) -> None:
        self._call = call
        self._own = call.columns.span(call.group.rank)
        self._received = like.new_empty(self._own.stop - self._own.start, like.shape[1])
        self._in_flight: tuple[slice, torch.Tensor, Pending] | None = None

    def deliver(self, part: slice, gradient: torch.Tensor) -> None:
        """Collective: every rank, the same parts in the same order. One reduce."""
        self._wait_for_part()
        spans = (self._call.columns.span(rank) for rank in range(self._call.group.size))
        owner = next(rank for rank, span in enumerate(spans) if part.start < span.stop)
        self._in_flight = part, gradient, self._call.group.reduce(gradient, owner)

    def mine(self) -> torch.Tensor:
        """The whole gradient of this rank's rows, once all parts have been delivered."""
        self._wait_for_part()
        return self._received

    def _wait_for_part(self) -> None:
        if self._in_flight is None:
            return
        part, gradient, pending = self._in_flight
        self._in_flight = None
        pending.wait()
        if self._own.start <= part.start < self._own.stop:
            start = part.start - self._own.start
            self._received[start : start + len(gradient)] = gradient


class _InfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: torch.Tensor,
        call: ContrastiveCall,
        positives: torch.Tensor | slice,
    ) -> torch.Tensor:
        with torch.autocast(a.device.type, enabled=False):
            rows, columns = upcast(a), upcast(all_rows(call.group, call.columns, b))
            rows, columns = promote_to_common_dtype(rows, columns)
            block = call.block(rows, columns, None)
            of_rows, of_columns = sums_of_exponentials(block, of_columns=True)
            log_rows, log_columns = of_rows.logarithm(), _over_ranks(call.group, of_columns)
            losses = (log_rows + log_columns[positives]) / 2 - block.of_pairs(positives)
        keep = positives if isinstance(positives, torch.Tensor) else None
        ctx.save_for_backward(a, columns, log_rows, log_columns, keep, scale)
        ctx.call, ctx.dtype = call, b.dtype
        ctx.place = None if keep is not None else positives
        return call.reduce_losses(losses)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: ContrastiveCall = ctx.call
        a, columns, log_rows, log_columns, positives, scale = ctx.saved_tensors
        row_weight, gradient = call.exchange_loss_gradient(ctx, gradient)
        where = ctx.place if positives is None else positives
        factor, by_row, by_column = _weights(call, gradient, row_weight, where, len(columns))
        coefficients = Coefficients(log_rows, log_columns, by_row, by_column, 2 * by_row)
        with torch.autocast(a.device.type, enabled=False):
            rows, columns = promote_to_common_dtype(upcast(a), columns)
            block = call.block(rows, columns, None)
            column_gradients = _ColumnGradients(call, rows) if ctx.needs_input_grad[1] else None
            by_rows = gradients(
                block,
                where,
                coefficients,
                parts=call.parts() if column_gradients else block.parts(),
                deliver=column_gradients.deliver if column_gradients else None,
            )
            of_scale = gradient_of_scale(rows, by_rows, factor, scale)
            of_a = by_rows.mul_(call.scale * factor).to(a.dtype)
            of_b = column_gradients.mine().mul_(factor).to(ctx.dtype) if column_gradients else None
        return of_a, of_b, of_scale, None, None


def _over_ranks(group: Group, mine: RunningLogSumExp) -> torch.Tensor:
    """log sum exp over the parts of all ranks.

    Collective:
        Every rank. Blocks. Two all-reduces.
    """
    largest = mine.exponent.clone()
    group.all_reduce(largest, MAX).wait()
    total = mine.sum * (mine.exponent - largest).exp2()
    group.all_reduce(total).wait()
    return (largest + total.log2()) / LOG2_E


def _weights(
    call: ContrastiveCall,
    gradient: torch.Tensor,
    row_weight: float,
    positives: torch.Tensor | slice,
    num_columns: int,
) -> tuple[float, torch.Tensor | float, torch.Tensor | float]:
    """A common factor of all pairs, and the weights of each row and of each column.

    Collective:
        Every rank. One all-reduce of a vector, unless all rows count the same and have their
        partners at the same place.
    """
    if call.reduction != "none" and isinstance(positives, slice):
        return row_weight / 2, 1.0, 1.0
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    rows = call.rows.counts[call.group.rank]
    by_row = (
        gradient.to(dtype) if call.reduction == "none" else gradient.new_full((rows,), row_weight)
    )
    by_column = by_row.new_zeros(num_columns)
    if isinstance(positives, slice):
        by_column[positives] = by_row
    else:
        by_column.index_add_(0, positives, by_row)
    call.group.all_reduce(by_column).wait()
    return 0.5, by_row, by_column
