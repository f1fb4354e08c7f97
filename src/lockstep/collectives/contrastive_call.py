# SPDX-License-Identifier: Apache-2.0
"""`ContrastiveCall`: the arguments of one contrastive loss, compared between the ranks.

Also the small functions that `info_nce` and `nt_xent` share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from lockstep.collectives.backward_agreement import BackwardCheck
from lockstep.collectives.call_preconditions import (
    group_for_call,
    has_no_samples,
    require_mean_reduction,
)
from lockstep.collectives.row_agreement import (
    RowLayout,
    agree_on_rows,
    format_ranks,
    require_rows,
)
from lockstep.collectives.similarity_tiles import Similarities, strips_of
from lockstep.errors import ConfigurationError, ReplicasDifferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.collectives.similarity_tiles import Tile
    from lockstep.group import Group

Reduction = Literal["mean", "sum", "none"]
_REDUCTIONS: Final = ("mean", "sum", "none")
TILE: Final = (512, 1024)
"""Two float32 tiles of this size are 4 MiB; measured flat in time around it."""

_MATRICES: Final = "two matrices with equally long rows, shapes (n, D) and (m, D)"
_POSITIVES: Final = "positives: one integer for each row of a"


@dataclass(frozen=True)
class ContrastiveCall:
    """One call of a contrastive loss, after the ranks have compared their arguments.

    Attributes:
        rows: layout of the rows of the matrix of similarities, which are rows of `a`.
        columns: layout of the columns of that matrix, which are rows of `b`.
        scale: the factor of the similarities.
        communication: the checks of the upcoming backward; None where no gradient is needed.
        is_empty: this rank has no samples in this step, and brings no rows (`has_no_samples`).
    """

    group: Group
    rows: RowLayout
    columns: RowLayout
    scale: float
    communication: BackwardCheck | None
    reduction: str
    tile: Tile
    is_empty: bool

    def block(self, rows: torch.Tensor, columns: torch.Tensor, own: int | None) -> Similarities:
        return Similarities(rows, columns, self.scale, self.tile, own)

    def parts(self) -> list[slice]:
        """The columns cut into widths of tiles, each of which belongs to one rank."""
        spans = [self.columns.span(rank) for rank in range(self.group.size)]
        return [part for span in spans for part in strips_of(span, self.tile[1])]

    def reduce_losses(self, losses: torch.Tensor) -> torch.Tensor:
        """The function's result: the losses of this rank's rows, or their global mean or sum.

        Gradient:
            None: inside a forward of our own.

        Collective:
            Unless the reduction is "none", every rank. Blocks. One all-reduce of a number.
        """
        if self.reduction == "none":
            return losses
        total = losses.double().sum()
        self.group.all_reduce(total).wait()
        return (total / self.divisor).to(losses.dtype)

    def as_of_batch(self, losses: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The function's result, with as many losses as the batch in hand has rows.

        A rank that brings no rows computes on another rank's batch with weight 0; the program goes
        on with its rows all the same, so they have zeros for losses.

        Gradient:
            That of `losses`: the backward of the function runs, for the other ranks' sake.

        Collective:
            None.
        """
        has_losses = self.reduction == "none" and self.is_empty
        return losses.sum().expand(num_rows) if has_losses else losses

    @property
    def divisor(self) -> int:
        return self.rows.total if self.reduction == "mean" else 1

    def exchange_loss_gradient(
        self, node: Any, gradient: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        """Exchange the gradients of the loss.

        Args:
            node: see `BackwardCheck.exchange_backward_info`.
            gradient: of the loss on this rank.

        Returns:
            The weight of one row's loss, if all rows have the same; and this rank's gradient.

        Gradient:
            The gradients of all ranks are summed; that of a rank with weight zero is zero.

        Collective:
            Every rank. One `Group.monitored_all_gather`.
        """
        assert self.communication is not None
        compared = gradient
        if self.reduction == "none":
            # What a loss of this rank's counts on average: more on a rank of few rows, in a mean.
            compared = gradient.sum().reshape(1) / max(1, len(gradient))
        infos = self.communication.exchange_backward_info(node, compared)
        if infos[self.group.rank].weight == 0.0:
            gradient = torch.zeros_like(gradient)
        return sum(one.scalar for one in infos) / self.divisor, gradient


def compare_arguments(
    name: str,
    tensors: tuple[torch.Tensor, torch.Tensor],
    logit_scale: torch.Tensor | float,
    positives: torch.Tensor | None,
    reduction: str,
    tile: Tile,
    group: Any,
) -> ContrastiveCall:
    """Compare the arguments of a loss between the ranks, before any row moves.

    Args:
        name: the function, as the user calls it.
        tensors: this rank's rows on either side, shapes (n, D) and (m, D).

    Gradient:
        None: metadata only.

    Collective:
        Every rank, same order. Blocks. One small all-gather.

    Raises:
        As `agree_on_rows` and `require_rows`; ConfigurationError, ReplicasDifferError: arguments
        that cannot be, or that differ between ranks.
    """
    ranks = group_for_call(name, group)
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(
            f"{name} has no reduction={reduction!r}", expected=str(_REDUCTIONS)
        )
    if reduction != "none":
        require_mean_reduction(name)
    a, b = tensors
    grad = False
    if isinstance(logit_scale, torch.Tensor):
        logit_scale, grad = logit_scale.detach(), logit_scale.requires_grad
    scale = float(logit_scale)
    rows = agree_on_rows(
        ranks,
        name,
        tensors,
        settings=[reduction, positives is not None, grad, *map(int, tile)],
        extras=[scale, *_range_of_positives(a, b, positives)],
    )
    require_rows(name, rows)
    if min(tile) < 1:
        raise ConfigurationError(
            f"{name} has no tile={tile!r}", expected=f"numbers of rows and columns, such as {TILE}"
        )
    columns = rows.with_counts(rows.others[0])
    _compare_calls(name, rows, columns, positives is not None)
    communication = None
    if torch.is_grad_enabled() and (grad or a.requires_grad or b.requires_grad):
        moving = rows if b.requires_grad else rows.with_counts(rows.counts)
        communication = BackwardCheck(name, ranks, moving, returns_rows=reduction == "none")
    return ContrastiveCall(
        ranks, rows, columns, scale, communication, reduction, tile, has_no_samples()
    )


def _range_of_positives(
    a: torch.Tensor, b: torch.Tensor, positives: torch.Tensor | None
) -> tuple[int, int, str | None]:
    """The smallest and the largest of `positives`; and for refused arguments, what was expected."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        return 0, 0, _MATRICES
    if positives is None or has_no_samples():
        return 0, 0, None
    if positives.is_floating_point() or positives.shape != a.shape[:1]:
        return 0, 0, _POSITIVES
    if len(positives) == 0:
        return 0, 0, None
    return int(positives.min()), int(positives.max()), None


def _compare_calls(name: str, rows: RowLayout, columns: RowLayout, has_positives: bool) -> None:
    scales, low, high, faults = zip(*rows.extras, strict=True)
    for expected in (_MATRICES, _POSITIVES):
        wrong = [fault == expected for fault in faults]
        _refuse_where(name, expected, wrong, "other shapes or dtypes")
    outside = [
        first < 0 or last >= max(1, columns.total) for first, last in zip(low, high, strict=True)
    ]
    _refuse_where(
        name,
        f"positives from 0 to {columns.total - 1}, the rows of b of all ranks",
        outside,
        f"from {min(low)} to {max(high)}",
    )
    if not has_positives:
        _refuse_where(
            name,
            "as many rows of a as of b, where no positives are given",
            [one != other for one, other in zip(rows.counts, columns.counts, strict=True)],
            f"{list(rows.counts)} rows of a and {list(columns.counts)} of b, by rank",
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
            where=format_ranks(where),
            expected=expected,
            got=got,
        )


def gradient_of_scale(
    rows: torch.Tensor, by_rows: torch.Tensor, factor: float, scale: torch.Tensor
) -> torch.Tensor:
    total = torch.dot(rows.flatten(), by_rows.flatten()) * factor
    return total.to(scale.device, scale.dtype).reshape(scale.shape)


def as_tensor(scale: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    return scale if isinstance(scale, torch.Tensor) else like.new_tensor(scale)


def upcast(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` detached, and at least float32: a softmax over many rows needs the precision."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


def promote_to_common_dtype(
    one: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    common = torch.promote_types(one.dtype, other.dtype)
    return one.to(common), other.to(common)
