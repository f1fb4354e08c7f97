# SPDX-License-Identifier: Apache-2.0
"""`nt_xent`: the loss of SimCLR over the rows of all ranks, without the matrix of all pairs.

One set of rows is on both sides, so S = scale * rows @ rows.T is symmetric, and the log sum exp of
a column is that of a row which another rank has. With those, each rank computes all of its rows'
gradient itself: three products of (rows here) x (rows everywhere) x D, and backward moves no rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep.collectives.contrastive_call import (
    TILE,
    as_tensor,
    compare_arguments,
    gradient_of_scale,
    upcast,
)
from lockstep.collectives.differentiable_gather import all_rows
from lockstep.collectives.similarity_tiles import Coefficients, gradients, sums_of_exponentials
from lockstep.compiler_disable import disable_dynamo

if TYPE_CHECKING:
    from lockstep.collectives.contrastive_call import ContrastiveCall, Reduction
    from lockstep.collectives.similarity_tiles import Tile


@disable_dynamo
def nt_xent(
    a: torch.Tensor,
    b: torch.Tensor,
    logit_scale: torch.Tensor | float,
    *,
    reduction: Reduction = "mean",
    tile: Tile = TILE,
    group: Any = None,
) -> torch.Tensor:
    """NT-Xent (the loss of SimCLR) over two views of the rows of all ranks, exact and tiled.

    Each row of either view is to find the other view of its sample among all other rows of both
    views. Rows are not normalised here.

    Args:
        a: one view of this rank's samples, shape (n, D); n may differ between ranks.
        b: the other view, shape (n, D).
        logit_scale: 1 / temperature.
        reduction: "mean" over the rows of both views of all ranks, "sum", or "none" for this
            rank's rows.
        tile: how much of the matrix exists at a time, the same on every rank; changes speed only.
        group: a `Group`, a process group, or None for the trainer's or the world group.

    Returns:
        The global loss, the same scalar on every rank; or shape (2n,), `a`'s rows first.

    Gradient:
        As `info_nce`.

    Collective:
        Every rank of `group`, in the same order. Blocks. Forward: one small all-gather, one
        all-gather of both views, one of a vector, one all-reduce of a number. Backward: one
        monitored all-gather, and with "none" one all-gather of a vector.

    Raises:
        As `info_nce`.
    """
    name = "lockstep.nt_xent(a, b, logit_scale)"
    call = compare_arguments(name, (a, b), logit_scale, None, reduction, tile, group)
    num_rows = len(a) + len(b)
    if call.is_empty:
        a, b = a[:0], b[:0]
    views = torch.cat([a, b])
    doubled = call.rows.with_counts([2 * count for count in call.rows.counts])
    call = replace(call, rows=doubled)
    apply: Any = _NTXent.apply
    loss: torch.Tensor = apply(views, as_tensor(logit_scale, a), call)
    return call.as_of_batch(loss, num_rows)


class _NTXent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, views: torch.Tensor, scale: torch.Tensor, call: ContrastiveCall
    ) -> torch.Tensor:
        span = call.rows.span(call.group.rank)
        with torch.autocast(views.device.type, enabled=False):
            rows, columns = upcast(views), upcast(all_rows(call.group, call.rows, views))
            block = call.block(rows, columns, span.start)
            of_rows, _ = sums_of_exponentials(block, of_columns=False)
            log_rows = of_rows.logarithm()
            log_columns = all_rows(call.group, call.rows, log_rows)
            partners = other_views(span, views.device)
            losses = log_rows - block.of_pairs(partners)
        ctx.save_for_backward(views, columns, log_rows, log_columns, partners, scale)
        ctx.call = call
        return call.reduce_losses(losses)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: ContrastiveCall = ctx.call
        views, columns, log_rows, log_columns, partners, scale = ctx.saved_tensors
        row_weight, gradient = call.exchange_loss_gradient(ctx, gradient)
        factor: float = row_weight
        by_row: torch.Tensor | float = 1.0
        by_column: torch.Tensor | float = 1.0
        on_pair: torch.Tensor | float = 2.0
        if call.reduction == "none":
            factor, by_row = 1.0, gradient.to(columns.dtype)
            by_column = all_rows(call.group, call.rows, by_row)
            on_pair = by_row + by_column[partners]
        coefficients = Coefficients(log_rows, log_columns, by_row, by_column, on_pair)
        with torch.autocast(views.device.type, enabled=False):
            rows = upcast(views)
            block = call.block(rows, columns, call.rows.span(call.group.rank).start)
            by_rows = gradients(block, partners, coefficients, parts=block.parts(), deliver=None)
            # Both (i, j) and (j, i) are in a row's gradient: each similarity counts twice.
            of_scale = gradient_of_scale(rows, by_rows, factor / 2, scale)
            of_views = by_rows.mul_(call.scale * factor).to(views.dtype)
        return of_views, of_scale, None


def other_views(span: slice, device: torch.device) -> torch.Tensor:
    half = (span.stop - span.start) // 2
    return torch.arange(span.start, span.stop, device=device).roll(half)
