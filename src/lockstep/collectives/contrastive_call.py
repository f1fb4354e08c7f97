# SPDX-License-Identifier: Apache-2.0
"""One call of a contrastive loss: what the ranks agree on, and what is the same for all losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from lockstep.collectives.communicating_backward import CommunicatingBackward
from lockstep.collectives.row_layout import (
    Agreed,
    agree_on_rows,
    brings_nothing,
    ranks_named,
    ranks_of,
    refuse_sums,
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

# What a rank alone finds wrong, by its number.
_FINE, _NOT_MATRICES, _POSITIVES = range(3)


@dataclass(frozen=True)
class Call:
    """One call, after the ranks have agreed on it."""

    group: Group
    agreed: Agreed
    columns: Agreed
    scale: float
    crossing: CommunicatingBackward | None
    reduction: str
    tile: Tile
    nothing: bool

    def block(self, rows: torch.Tensor, columns: torch.Tensor, own: int | None) -> Similarities:
        return Similarities(rows, columns, self.scale, self.tile, own)

    def parts(self) -> list[slice]:
        """The columns in the widths of tiles, none of which belongs to two ranks."""
        spans = [self.columns.span(rank) for rank in range(self.group.size)]
        return [part for span in spans for part in strips_of(span, self.tile[1])]

    def reduced(self, losses: torch.Tensor) -> torch.Tensor:
        """What the user gets for the losses of this rank's rows.

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

    @property
    def divisor(self) -> int:
        return self.agreed.total if self.reduction == "mean" else 1

    def call_roll(self, gradient: torch.Tensor) -> tuple[float, torch.Tensor]:
        """What one row's loss counts for, if all count the same; and this rank's gradient.

        Gradient:
            What flows back on all ranks is summed; of a rank that counts for nothing, zero.

        Collective:
            Every rank. One roll call.
        """
        assert self.crossing is not None
        heard = self.crossing.call_roll(gradient)
        if heard.weights[self.group.rank] == 0.0:
            gradient = torch.zeros_like(gradient)
        return sum(heard.scalars) / self.divisor, gradient


def agreed_call(
    name: str,
    tensors: tuple[torch.Tensor, torch.Tensor],
    logit_scale: torch.Tensor | float,
    positives: torch.Tensor | None,
    reduction: str,
    tile: Tile,
    group: Any,
) -> Call:
    """What a loss is called with, compared between the ranks before anything of it moves.

    Args:
        name: the function, as the user calls it.
        tensors: this rank's rows on either side, shapes (n, D) and (m, D).

    Gradient:
        None: metadata only.

    Collective:
        Every rank, same order. Blocks. One small all-gather.

    Raises:
        As `agree_on_rows`; ConfigurationError, ReplicasDifferError: arguments that cannot be, or
        that differ between ranks.
    """
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
        crossing = CommunicatingBackward(name, ranks, agreed)
    return Call(ranks, agreed, columns, scale, crossing, reduction, tile, brings_nothing())


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


def gradient_of_scale(
    rows: torch.Tensor, by_rows: torch.Tensor, factor: float, scale: torch.Tensor
) -> torch.Tensor:
    total = torch.dot(rows.flatten(), by_rows.flatten()) * factor
    return total.to(scale.device, scale.dtype).reshape(scale.shape)


def as_tensor(scale: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    return scale if isinstance(scale, torch.Tensor) else like.new_tensor(scale)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, and at least float32: a softmax over many rows needs it."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


def alike(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    common = torch.promote_types(one.dtype, other.dtype)
    return one.to(common), other.to(common)
