# SPDX-License-Identifier: Apache-2.0
"""`BackwardCheck`: the checks before a backward in which gradients travel between ranks.

Every function of `collectives` that communicates in its backward first exchanges a `BackwardInfo`
with all ranks. A rank that leaves its backward out is named in an error instead of waited for. Two
faults can be found only in backward, and all ranks raise for them, because all have the same
information: unequal weights that are applied at the reduction, instead of to the loss (a gradient
that has crossed to another rank would be multiplied by that rank's weight), and, for a function
that needs one loss, ranks that differentiate different losses.
"""

from __future__ import annotations

import math
import threading
import warnings
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from lockstep import reduction_context
from lockstep._torch_compat import current_graph_task
from lockstep.collectives.row_agreement import format_ranks
from lockstep.crossed_gradients import note_crossing
from lockstep.errors import (
    CrossedWeightsError,
    LossesDifferError,
    RowsDifferError,
    UnequalRowsWarning,
    WrongUseError,
)
from lockstep.expected_exchange import ExpectedExchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.collectives.row_agreement import RowLayout
    from lockstep.group import Group

_PRINTS: Final = 8


class BackwardInfo(NamedTuple):
    """The numbers that one rank sends to the others before a backward.

    Attributes:
        call_id: the number that the rank gave the call in its forward.
        weight: of the rank's loss; of a loss that is a sum only whether it counts, as 1.0 or 0.0.
        at_root: 1.0 if the rank's loss was multiplied by the weight, else 0.0.
        scalar: this rank's gradient of the function's result, if that is a number; zero with
            weight zero.
        fingerprint: see `fingerprint_of`, where losses are compared; else zeros.
    """

    call_id: float
    weight: float
    at_root: float
    scalar: float
    fingerprint: list[float]


class BackwardCheck:
    """The upcoming backward of one call; made in the forward, kept by the autograd graph.

    Args:
        function: as the user calls it.
        layout: of the rows that the ranks brought to the forward; `others` only of tensors whose
            gradient travels as well.
        returns_rows: the function returns rows, from which a loss is computed; False: it returns
            the loss.
    """

    def __init__(
        self, function: str, group: Group, layout: RowLayout, *, returns_rows: bool = False
    ) -> None:
        self.function = function
        self.group = group
        self.layout = layout
        self.averages = _losses_are_averaged()
        # Unequal numbers of rows and equal weights: right for one loss, rarely for a mean per rank.
        self._is_doubtful = returns_rows and self.averages and not layout.is_even
        # Autograd may run backward on a thread that has no reduction context of this rank; and the
        # weight may change until then, which the reduction reads during the backward.
        self._holder = reduction_context.weight_holder()
        self._expected_exchange = ExpectedExchange(group)

    def exchange_backward_info(
        self, node: Any, gradient: torch.Tensor, *, one_loss: bool = False
    ) -> list[BackwardInfo]:
        """Exchange a `BackwardInfo` with the other ranks, and raise on all of them or on none.

        Args:
            node: the context of the function's backward, which is its node in the graph.
            gradient: of the function's output on this rank; a scalar is sent along.
            one_loss: refuse ranks that differentiate different losses.

        Returns:
            The infos of all ranks, by rank.

        Collective:
            Every rank that ran the forward. Blocks, but not for ever: see
            `Group.monitored_all_gather`.

        Raises:
            WrongUseError: a backward that is to be differentiated itself.
            PeerLostError: names the ranks that did not come.
            CrossedWeightsError: the weights differ, and are not on the roots.
            LossesDifferError: with `one_loss`, the ranks' losses are not one.
            RowsDifferError: the ranks run backward through different calls.
        """
        self._refuse_differentiating()
        weight, at_root = self._own_weight()
        scalar = float(gradient) if gradient.numel() == 1 and weight != 0.0 else 0.0
        doubtful = self._is_doubtful and not at_root
        prints = [0.0] * _PRINTS
        if one_loss or doubtful:
            prints = fingerprint_of(gradient, weight if at_root else 1.0)
        numbers = [
            float(self.layout.call_ids[self.group.rank]),
            weight,
            float(at_root),
            scalar if math.isfinite(scalar) else math.inf,
            *prints,
        ]
        received = self.group.monitored_all_gather(numbers)
        self._expected_exchange.finish()
        infos = [
            BackwardInfo(
                call_id, weight, at_root, math.nan if math.isinf(scalar) else scalar, prints
            )
            for call_id, weight, at_root, scalar, *prints in received
        ]
        if [int(one.call_id) for one in infos] != list(self.layout.call_ids):
            raise RowsDifferError(
                f"the ranks run backward through different calls of {self.function}",
                where=self.group.place,
                cause="their losses use the outputs of several calls in another order",
                fix="compute the loss by the same code on every rank",
            )
        self._compare_weights(infos)
        if self.group.size > 1 and not at_root:
            note_crossing(node)
        differing = _ranks_with_another_loss(infos, gradient.dtype)
        if differing and one_loss:
            raise self._different_losses(differing)
        if differing and doubtful and not _global_mean_has_run():
            self._warn_of_means()
        return infos

    def _refuse_differentiating(self) -> None:
        # Autograd runs a backward with gradients enabled if it is to be differentiated itself.
        if torch.is_grad_enabled():
            raise WrongUseError(
                f"{self.function} can be differentiated once",
                where=self.group.place,
                cause="backward(create_graph=True), or autograd.grad(create_graph=True)",
                fix="leave create_graph out; for a gradient penalty, differentiate the part"
                " before the ranks meet",
            )

    def _own_weight(self) -> tuple[float, bool]:
        current = reduction_context.active()
        if current is not None and current.at_root:
            return (1.0 if current.weight is None else current.weight), True
        weight = 1.0 if self._holder.weight is None else self._holder.weight
        # Gradients that are added up are not multiplied by a weight: only zero drops them.
        return (weight if self.averages else float(weight > 0)), False

    def _compare_weights(self, infos: Sequence[BackwardInfo]) -> None:
        weights = [one.weight for one in infos]
        self._refuse_silenced_rows(weights)
        on_roots = {one.at_root for one in infos}
        counting = {weight for weight in weights if weight != 0.0}
        if on_roots == {1.0} or (on_roots == {0.0} and len(counting) < 2):
            return
        listed = ", ".join(
            f"{one.weight:g} {'at the root' if one.at_root else 'at the reduction'} on rank {rank}"
            for rank, one in enumerate(infos)
        )
        raise CrossedWeightsError(
            f"the gradients of {self.function} cross ranks before unequal weights are applied",
            where=self.group.place,
            expected="weights at the root of backward, or equal ones",
            got=listed,
            cause="a plain loss.backward() carries its batch's weight at the reduction",
            fix="self.backward(loss), in a LightningModule self.manual_backward(loss)"
            if isinstance(self._holder, reduction_context.ReductionContext)
            else "gradients.backward(loss, weight=...)",
        )

    def _refuse_silenced_rows(self, weights: Sequence[float]) -> None:
        rows = list(zip(self.layout.counts, *self.layout.others, strict=True))
        silent = [rank for rank, own in enumerate(rows) if weights[rank] == 0.0 and any(own)]
        if not silent:
            return
        fix = "bring no rows where a batch should not count: x[:0]"
        if not all(self.layout.counts[rank] for rank in silent):
            fix += (
                "; a rank that brings negatives alone has a weight above zero, such as"
                ' weight=len(b), and the loss of all rows, reduction="mean"'
            )
        raise CrossedWeightsError(
            f"rows went into {self.function} whose gradients would be dropped",
            where=f"rank {', '.join(map(str, silent))} of {self.group.size}",
            got="a backward of weight zero, through rows that the other ranks' losses hold",
            fix=fix,
        )

    def _different_losses(self, ranks: list[int]) -> LossesDifferError:
        return LossesDifferError(
            f'{self.function} with backward="replicated" needs one loss of all ranks',
            where=f"{format_ranks(ranks)} against the first one",
            expected="the same function of all gathered rows on every rank",
            cause="a loss over this rank's rows, or random numbers of its own, such as negatives",
            fix='backward="adjoint"',
        )

    def _warn_of_means(self) -> None:
        rows = self.layout.counts
        empty = [rank for rank, count in enumerate(rows) if count == 0]
        nobody = f"; rank {', '.join(map(str, empty))} has none" if empty else ""
        warnings.warn(
            f"[{UnequalRowsWarning.code}] the ranks gathered {list(rows)} rows{nobody}, have a loss"
            " each, and all count alike. If the losses are means over a rank's own rows, the"
            " gradient is not that of the mean over all rows: use"
            " gradients.backward(loss, weight=len(rows)) or"
            " lockstep.global_mean(loss_of_each_row).",
            UnequalRowsWarning,
            stacklevel=2,
        )


def fingerprint_of(gradient: torch.Tensor, scale: float) -> list[float]:
    """A few numbers that are equal if gradients are equal: a norm, and random projections.

    Args:
        gradient: of any shape.
        scale: a factor that `gradient` holds and that is divided out; zero: compare nothing.
    """
    if scale == 0.0:
        return [0.0] * _PRINTS
    flat = gradient.detach().reshape(len(gradient), -1).double()
    generator = torch.Generator().manual_seed(5)
    left = torch.randn(
        _PRINTS - 1, flat.shape[0], generator=generator, dtype=torch.float64, device="cpu"
    )
    right = torch.randn(flat.shape[1], generator=generator, dtype=torch.float64, device="cpu")
    projected = left.to(flat.device) @ (flat @ right.to(flat.device))
    numbers = [float(flat.norm()) / scale, *(projected / scale).tolist()]
    return [number if math.isfinite(number) else math.inf for number in numbers]


def _ranks_with_another_loss(infos: Sequence[BackwardInfo], dtype: torch.dtype) -> list[int]:
    """The ranks whose gradient differs from that of the first rank with a weight above zero."""
    prints = {rank: one.fingerprint for rank, one in enumerate(infos) if one.weight != 0.0}
    if not prints:
        return []
    first = next(iter(prints.values()))
    # On an accelerator the order of sums may differ: equal losses are equal up to rounding.
    tolerance = math.sqrt(torch.finfo(dtype).eps) * first[0]
    return [
        rank
        for rank, own in prints.items()
        if own != first
        and not all(abs(a - b) <= tolerance for a, b in zip(own, first, strict=True))
    ]


_of_this_thread = threading.local()


def note_global_mean() -> None:
    """Note that `global_mean` is part of the loss whose backward runs on this thread."""
    _of_this_thread.task = current_graph_task()


def _global_mean_has_run() -> bool:
    return getattr(_of_this_thread, "task", None) == current_graph_task()


def _losses_are_averaged() -> bool:
    current = reduction_context.active()
    return current is None or current.averages
