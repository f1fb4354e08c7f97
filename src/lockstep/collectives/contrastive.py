# SPDX-License-Identifier: Apache-2.0
"""Contrastive losses over the rows of all ranks, exact, without the matrix of all pairs.

A rank owns the rows of S = scale * a @ b.T that are its own rows of `a`, for all columns. The
log sum exp of a row is this rank's affair; that of a column takes two all-reduces of a vector.
So one block serves both directions, only `b` is gathered, and what is computed is four products
of (rows here) x (rows everywhere) x D: S, S again in backward, and two gradients. Losses over
local rows that gather both sides need six.

dL/dS of pair (i, j) is (p_ij + q_ij) / 2B, where p and q are the softmax of the row and of the
column, less 1/B at the positive. The temperature's gradient is <a, dL/da> / scale.

`nt_xent` has one set of rows on both sides, so S is symmetric and the log sum exp of a column is
that of a row which another rank has. With those, each rank computes all of its rows' gradient
itself: three products, and no reduce-scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from lockstep.collectives.agreement import (
    Agreed,
    agree_on_rows,
    brings_nothing,
    ranks_named,
    ranks_of,
    refuse_sums,
)
from lockstep.collectives.crossing import CrossingBackward
from lockstep.collectives.eager import outside_graphs
from lockstep.collectives.gathering import all_rows, sum_of_own_rows
from lockstep.collectives.tiles import Coefficients, Similarities, gradients, sums_of_exponentials
from lockstep.errors import ConfigurationError, ReplicasDifferError
from lockstep.group import MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.collectives.tiles import Sums, Tile
    from lockstep.group import Group

Reduction = Literal["mean", "sum", "none"]
_REDUCTIONS: Final = ("mean", "sum", "none")
TILE: Final = (512, 1024)
"""Two float32 tiles of this size are 4 MiB; measured flat in time around it."""

# What a rank alone finds wrong, by its number.
_FINE, _NOT_MATRICES, _POSITIVES = range(3)


@outside_graphs
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
        tile: how much of the matrix exists at a time; changes speed only.
        group: a `Group`, a process group, or None for the trainer's or the world group.

    Returns:
        The global loss, the same scalar on every rank; or shape (n,). 16-bit inputs are
        computed in float32. A worker whose batch is borrowed brings no rows.

    Gradient:
        That of (sum over ranks of what flows back) times the loss, on this rank's rows and this
        rank's part of `logit_scale`: right under any synchronisation that averages.

    Collective:
        Every rank of `group`, in the same order. Blocks. Forward: one small all-gather, one
        all-gather of `b`, two all-reduces of a vector, one of a number. Backward: one roll
        call, one reduce-scatter of the shape of all `b`.

    Raises:
        As `gather`; ConfigurationError for shapes and positives that cannot be, and in an
        operator with ``loss_reduction="sum"``.
    """
    name = "lockstep.info_nce(a, b, logit_scale)"
    call = _agreed_call(name, (a, b), logit_scale, positives, reduction, tile, group)
    if call.nothing:
        a, b, positives = a[:0], b[:0], None if positives is None else positives[:0]
    ours = call.agreed.span(call.group.rank)
    where = ours if positives is None else positives.to(a.device)
    apply: Any = _InfoNCE.apply
    loss: torch.Tensor = apply(a, b, _as_tensor(logit_scale, a), call, where)
    return loss


@outside_graphs
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
        tile: how much of the matrix exists at a time; changes speed only.
        group: a `Group`, a process group, or None for the trainer's or the world group.

    Returns:
        The global loss, the same scalar on every rank; or shape (2n,), `a`'s rows first.

    Gradient:
        As `info_nce`.

    Collective:
        Every rank of `group`, in the same order. Blocks. Forward: one small all-gather, one
        all-gather of both views, one of a vector, one all-reduce of a number. Backward: one
        roll call, and with "none" one all-gather of a vector.

    Raises:
        As `info_nce`.
    """
    name = "lockstep.nt_xent(a, b, logit_scale)"
    call = _agreed_call(name, (a, b), logit_scale, None, reduction, tile, group)
    if call.nothing:
        a, b = a[:0], b[:0]
    views = torch.cat([a, b])
    doubled = call.agreed.with_rows([2 * count for count in call.agreed.rows])
    call = replace(call, agreed=doubled)
    apply: Any = _NTXent.apply
    loss: torch.Tensor = apply(views, _as_tensor(logit_scale, a), call)
    return loss


@dataclass(frozen=True)
class _Call:
    """One call, after the ranks have agreed on it."""

    group: Group
    agreed: Agreed
    columns: Agreed
    scale: float
    crossing: CrossingBackward | None
    reduction: str
    tile: Tile
    nothing: bool

    def block(self, rows: torch.Tensor, columns: torch.Tensor, own: int | None) -> Similarities:
        return Similarities(rows, columns, self.scale, self.tile, own)

    def reduced(self, losses: torch.Tensor) -> torch.Tensor:
        if self.reduction == "none":
            return losses
        total = losses.double().sum()
        self.group.all_reduce(total).wait()
        return (total / self.divisor).to(losses.dtype)

    @property
    def divisor(self) -> int:
        return self.agreed.total if self.reduction == "mean" else 1

    def call_roll(self, gradient: torch.Tensor) -> tuple[float, torch.Tensor]:
        """What one row's loss counts for, if all count the same; and this rank's gradient."""
        assert self.crossing is not None
        heard = self.crossing.call_roll(gradient)
        if heard.weights[self.group.rank] == 0.0:
            gradient = torch.zeros_like(gradient)
        return sum(heard.scalars) / self.divisor, gradient


class _InfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: torch.Tensor,
        call: _Call,
        positives: torch.Tensor | slice,
    ) -> torch.Tensor:
        with torch.autocast(a.device.type, enabled=False):
            rows, columns = _wide(a), _wide(all_rows(call.group, call.columns, b))
            rows, columns = _alike(rows, columns)
            block = call.block(rows, columns, None)
            of_rows, of_columns = sums_of_exponentials(block, of_columns=True)
            log_rows, log_columns = of_rows.logarithm(), _over_ranks(call.group, of_columns)
            losses = (log_rows + log_columns[positives]) / 2 - block.of_pairs(positives)
        keep = positives if isinstance(positives, torch.Tensor) else None
        ctx.save_for_backward(a, columns, log_rows, log_columns, keep, scale)
        ctx.call, ctx.dtype = call, b.dtype
        ctx.place = None if keep is not None else positives
        return call.reduced(losses)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        a, columns, log_rows, log_columns, positives, scale = ctx.saved_tensors
        each, gradient = call.call_roll(gradient)
        where = ctx.place if positives is None else positives
        factor, by_row, by_column = _weights(call, gradient, each, where, len(columns))
        coefficients = Coefficients(log_rows, log_columns, by_row, by_column, 2 * by_row)
        with torch.autocast(a.device.type, enabled=False):
            rows, columns = _alike(_wide(a), columns)
            by_rows, by_columns = gradients(
                call.block(rows, columns, None),
                where,
                coefficients,
                of_columns=ctx.needs_input_grad[1],
            )
            of_scale = _as_gradient(rows, by_rows, factor, scale)
            of_a = by_rows.mul_(call.scale * factor).to(a.dtype)
            of_b = None
            if by_columns is not None:
                mine = sum_of_own_rows(call.group, call.columns, by_columns)
                of_b = mine.mul_(factor).to(ctx.dtype)
        return of_a, of_b, of_scale, None, None


class _NTXent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, views: torch.Tensor, scale: torch.Tensor, call: _Call) -> torch.Tensor:
        span = call.agreed.span(call.group.rank)
        with torch.autocast(views.device.type, enabled=False):
            rows, columns = _wide(views), _wide(all_rows(call.group, call.agreed, views))
            block = call.block(rows, columns, span.start)
            of_rows, _ = sums_of_exponentials(block, of_columns=False)
            log_rows = of_rows.logarithm()
            log_columns = all_rows(call.group, call.agreed, log_rows)
            partners = _other_views(span, views.device)
            losses = log_rows - block.of_pairs(partners)
        ctx.save_for_backward(views, columns, log_rows, log_columns, partners, scale)
        ctx.call = call
        return call.reduced(losses)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        views, columns, log_rows, log_columns, partners, scale = ctx.saved_tensors
        each, gradient = call.call_roll(gradient)
        factor: float = each
        by_row: torch.Tensor | float = 1.0
        by_column: torch.Tensor | float = 1.0
        on_pair: torch.Tensor | float = 2.0
        if call.reduction == "none":
            factor, by_row = 1.0, gradient.to(columns.dtype)
            by_column = all_rows(call.group, call.agreed, by_row)
            on_pair = by_row + by_column[partners]
        coefficients = Coefficients(log_rows, log_columns, by_row, by_column, on_pair)
        with torch.autocast(views.device.type, enabled=False):
            rows = _wide(views)
            block = call.block(rows, columns, call.agreed.span(call.group.rank).start)
            by_rows, _ = gradients(block, partners, coefficients, of_columns=False)
            # Both (i, j) and (j, i) are in a row's gradient: each similarity counts twice.
            of_scale = _as_gradient(rows, by_rows, factor / 2, scale)
            of_views = by_rows.mul_(call.scale * factor).to(views.dtype)
        return of_views, of_scale, None


def _agreed_call(
    name: str,
    tensors: tuple[torch.Tensor, torch.Tensor],
    logit_scale: torch.Tensor | float,
    positives: torch.Tensor | None,
    reduction: str,
    tile: Tile,
    group: Any,
) -> _Call:
    ranks = ranks_of(name, group)
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(
            f"{name} has no reduction={reduction!r}", expected=str(_REDUCTIONS)
        )
    if reduction != "none":
        refuse_sums(name)
    a, b = tensors
    grad = False
    if isinstance(logit_scale, torch.Tensor):
        logit_scale, grad = logit_scale.detach(), logit_scale.requires_grad
    scale = float(logit_scale)
    agreed = agree_on_rows(
        ranks,
        name,
        tensors,
        settings=[_REDUCTIONS.index(reduction), positives is not None, grad],
        extras=[scale if math.isfinite(scale) else math.inf, *_range_of(a, b, positives)],
    )
    columns = agreed.with_rows(agreed.others[0])
    _compare_calls(name, agreed, columns, positives is not None)
    crossing = None
    if torch.is_grad_enabled() and (grad or a.requires_grad or b.requires_grad):
        crossing = CrossingBackward(name, ranks, agreed)
    return _Call(ranks, agreed, columns, scale, crossing, reduction, tile, brings_nothing())


def _range_of(
    a: torch.Tensor, b: torch.Tensor, positives: torch.Tensor | None
) -> tuple[int, int, int]:
    """The smallest and the largest partner, and what is wrong here."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        return 0, 0, _NOT_MATRICES
    if positives is None or brings_nothing():
        return 0, 0, _FINE
    if positives.is_floating_point() or positives.shape != a.shape[:1]:
        return 0, 0, _POSITIVES
    if len(positives) == 0:
        return 0, 0, _FINE
    return int(positives.min()), int(positives.max()), _FINE


def _compare_calls(name: str, agreed: Agreed, columns: Agreed, has_positives: bool) -> None:
    scales, low, high, faults = zip(*agreed.extras, strict=True)
    for fault, text in (
        (_NOT_MATRICES, "two matrices with equally long rows, shapes (n, D) and (m, D)"),
        (_POSITIVES, "positives: one integer for each row of a"),
    ):
        _refuse_where(name, text, [found == fault for found in faults], "other shapes or dtypes")
    outside = [
        first < 0 or last >= max(1, columns.total) for first, last in zip(low, high, strict=True)
    ]
    _refuse_where(
        name,
        f"positives from 0 to {columns.total - 1}, the rows of b of all ranks",
        outside,
        f"from {min(low):.0f} to {max(high):.0f}",
    )
    if not has_positives:
        _refuse_where(
            name,
            "as many rows of a as of b, where no positives are given",
            [one != other for one, other in zip(agreed.rows, columns.rows, strict=True)],
            f"{list(agreed.rows)} rows of a and {list(columns.rows)} of b, by rank",
        )
    if max(scales) - min(scales) > 1e-3 * max(map(abs, scales)):
        raise ReplicasDifferError(
            f"the ranks call {name} with different scales",
            got=", ".join(f"{scale:g} on rank {rank}" for rank, scale in enumerate(scales)),
            cause="the temperature is not synchronised, so that the ranks have drifted apart",
            fix="register it with the model, or hand its module to lockstep.replicate([...])",
        )


def _refuse_where(name: str, expected: str, wrong: Sequence[bool], got: str) -> None:
    where = [rank for rank, is_wrong in enumerate(wrong) if is_wrong]
    if where:
        raise ConfigurationError(
            f"{name} was given something else than it needs",
            where=ranks_named(where),
            expected=expected,
            got=got,
        )


def _over_ranks(group: Group, mine: Sums) -> torch.Tensor:
    """log sum exp over the parts of all ranks.

    Collective:
        Every rank. Blocks. Two all-reduces.
    """
    largest = mine.largest.clone()
    group.all_reduce(largest, MAX).wait()
    total = mine.sum * (mine.largest - largest).exp()
    group.all_reduce(total).wait()
    return largest + total.log()


def _weights(
    call: _Call,
    gradient: torch.Tensor,
    each: float,
    positives: torch.Tensor | slice,
    num_columns: int,
) -> tuple[float, torch.Tensor | float, torch.Tensor | float]:
    """A common factor, and what each row and each column counts for.

    Collective:
        Every rank. One all-reduce of a vector, unless all rows count the same and have their
        partners at the same place.
    """
    if call.reduction != "none" and isinstance(positives, slice):
        return each / 2, 1.0, 1.0
    wide = torch.promote_types(gradient.dtype, torch.float32)
    rows = call.agreed.rows[call.group.rank]
    by_row = gradient.to(wide) if call.reduction == "none" else gradient.new_full((rows,), each)
    by_column = by_row.new_zeros(num_columns)
    if isinstance(positives, slice):
        by_column[positives] = by_row
    else:
        by_column.index_add_(0, positives, by_row)
    call.group.all_reduce(by_column).wait()
    return 0.5, by_row, by_column


def _as_gradient(
    rows: torch.Tensor, by_rows: torch.Tensor, factor: float, scale: torch.Tensor
) -> torch.Tensor:
    total = torch.dot(rows.flatten(), by_rows.flatten()) * factor
    return total.to(scale.device, scale.dtype).reshape(scale.shape)


def _other_views(span: slice, device: torch.device) -> torch.Tensor:
    half = (span.stop - span.start) // 2
    return torch.arange(span.start, span.stop, device=device).roll(half)


def _as_tensor(scale: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    return scale if isinstance(scale, torch.Tensor) else like.new_tensor(scale)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, and at least float32: a softmax over many rows needs it."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


def _alike(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    common = torch.promote_types(one.dtype, other.dtype)
    return one.to(common), other.to(common)
