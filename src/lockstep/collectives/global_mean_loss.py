# SPDX-License-Identifier: Apache-2.0
"""`global_mean`: the mean of a loss over the rows of all ranks, with gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.collectives.backward_agreement import BackwardCheck, note_global_mean
from lockstep.collectives.call_preconditions import (
    group_for_call,
    has_no_samples,
    require_mean_reduction,
)
from lockstep.collectives.row_agreement import agree_on_rows, require_rows
from lockstep.compiler_disable import disable_dynamo
from lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from lockstep.group import Group


@disable_dynamo
def global_mean(per_row_loss: torch.Tensor, *, group: Any = None) -> torch.Tensor:
    """The mean of a loss over the rows of all ranks; the same number on every rank.

    Where ranks have different numbers of rows, the mean of the ranks' means is another number. The
    gradient is that of the global mean, whether the backwards are weighted or not.

    Args:
        per_row_loss: one number for each of this rank's rows, in dimension 0; further
            dimensions are averaged over as well. May have no rows.
        group: a `Group`, a process group, or None for the trainer's or the world group.

    Returns:
        A scalar.

    Gradient:
        With g = the sum over ranks of `grad_output`: g / (number of all elements), on every row.

    Collective:
        Every rank of `group`, in the same order. Blocks. Forward: one small all-gather, one
        all-reduce of a number. Backward: one monitored all-gather.

    Raises:
        As `gather`; ConfigurationError in an operator with ``loss_reduction="sum"``, and for
        rows that hold no number.
    """
    name = "lockstep.global_mean(per_row_loss)"
    ranks = group_for_call(name, group)
    require_mean_reduction(name)
    layout = agree_on_rows(ranks, name, [per_row_loss])
    require_rows(name, layout)
    mine = per_row_loss[:0] if has_no_samples() else per_row_loss
    elements = layout.total * per_row_loss.shape[1:].numel()
    if elements == 0:  # on every rank: they have agreed on the shape of a row
        raise ConfigurationError(
            f"{name} was given rows that hold no number",
            got=f"shape {tuple(per_row_loss.shape)}",
            cause="a loss over nothing is NaN",
            fix="give one number for each row",
        )
    needs = per_row_loss.requires_grad and torch.is_grad_enabled()
    communication = BackwardCheck(name, ranks, layout) if needs else None
    apply: Any = _GlobalMean.apply
    mean: torch.Tensor = apply(mine, ranks, elements, communication)
    return mean


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        group: Group,
        elements: int,
        communication: BackwardCheck | None,
    ) -> torch.Tensor:
        ctx.communication, ctx.elements, ctx.shape = communication, elements, rows.shape
        ctx.dtype = rows.dtype
        total = rows.detach().double().sum()
        group.all_reduce(total).wait()
        return (total / elements).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        infos = ctx.communication.exchange_backward_info(ctx, gradient)
        note_global_mean()
        share = sum(one.scalar for one in infos) / ctx.elements
        return gradient.new_full(ctx.shape, share, dtype=ctx.dtype), None, None, None
