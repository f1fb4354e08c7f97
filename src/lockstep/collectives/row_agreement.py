# SPDX-License-Identifier: Apache-2.0
"""`RowLayout`: how many rows each rank brings to a call; `agree_on_rows` exchanges and checks it.

Gloo ends the whole process when ranks bring tensors of different sizes to one collective, and no
process is left to report that. So every rank first sends a description of its tensors. A fault that
one rank alone finds is part of its description, and all ranks raise for it, so that no rank waits
for another.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from lockstep.collectives.call_preconditions import has_no_samples
from lockstep.errors import (
    ConfigurationError,
    LockstepError,
    RowsDifferError,
    WrongTypeError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.group import Group

_MAX_DIMS: Final = 8
_DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
_LABELS: Final = (
    "for labels: lockstep.gather(labels.double()).long(), or torch.distributed.all_gather"
)
_call_ids = itertools.count(1)


@dataclass(frozen=True)
class RowLayout:
    """The number of rows that each rank brings to one call, and what else the ranks exchanged.

    Attributes:
        counts: numbers of rows of the first tensor, by rank.
        call_ids: the number that each rank gave this call; its backward is recognised by it.
        extras: of `agree_on_rows`, by rank.
        others: the further tensors' `counts`.
    """

    counts: tuple[int, ...]
    call_ids: tuple[int, ...]
    extras: tuple[list[Any], ...]
    others: tuple[tuple[int, ...], ...] = ()

    def with_counts(self, counts: Sequence[int]) -> RowLayout:
        """This layout with other `counts`, for another tensor of the same call."""
        return replace(self, counts=tuple(counts), others=())

    def span(self, rank: int) -> slice:
        """The place of the rows of `rank` among the rows of all ranks."""
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def longest(self) -> int:
        return max(self.counts)

    @property
    def is_even(self) -> bool:
        """Whether every rank brings the same number of rows."""
        return len(set(self.counts)) == 1


def agree_on_rows(
    group: Group,
    function: str,
    tensors: Sequence[torch.Tensor],
    *,
    dim: int = 0,
    uneven: str = "pad",
    settings: Sequence[Any] = (),
    extras: Sequence[Any] = (),
) -> RowLayout:
    """Compare the ranks' tensors and arguments, on all ranks, before any row moves.

    Args:
        function: as the user calls it.
        tensors: the first one's length along `dim` counts as this rank's rows. Everything
            else about them has to be equal on all ranks.
        uneven: "error" refuses ranks with different numbers of rows.
        settings: further JSON-able arguments that have to be equal on all ranks.
        extras: further JSON-able values that may differ; returned for every rank.

    Gradient:
        None: metadata only.

    Collective:
        Every rank, same order. Blocks. One small all-gather.

    Raises:
        WrongTypeError: something else than floating-point numbers, on any rank. Of a tensor on
            "meta", which has no values to move, any dtype will do.
        RowsDifferError: the tensors do not fit together; names the ranks.
        ConfigurationError: the settings differ.
    """
    called = [function, *settings]
    described = [_Description.of(tensor, dim) for tensor in tensors]
    mine = [called, next(_call_ids), extras, described]
    calls, call_ids, all_extras, descriptions = zip(*group.exchange(mine), strict=True)
    _compare_settings(function, calls)
    by_tensor = [[_Description(*one) for one in ranks] for ranks in zip(*descriptions, strict=True)]
    for position, by_rank in enumerate(by_tensor):
        _compare(function, by_rank, dim, uneven if position == 0 else "pad")
    rows, *others = (tuple(one.rows for one in by_rank) for by_rank in by_tensor)
    return RowLayout(rows, call_ids, all_extras, tuple(others))


def require_rows(function: str, layout: RowLayout) -> None:
    """Refuse a loss over no rows.

    Raises:
        RowsDifferError: no rank brings a row; on all ranks.
    """
    if layout.total == 0:
        raise RowsDifferError(
            f"{function} was given no row by any rank",
            got="zero rows on " + format_ranks(range(len(layout.counts))),
            cause="a loss over nothing is NaN",
            fix="leave out a step for which no rank has a sample; where ranks outside of this group"
            " have some, call gradients.reduce_pending() here in the place of the loss's backward",
        )


class _Description(NamedTuple):
    """One tensor, as its rank describes it to the others.

    Attributes:
        fault: "dtype" or "dim" if no call can gather such a tensor.
        rows: its length along `dim`; zero if the batch is borrowed (see `has_no_samples`).
    """

    fault: str | None
    dtype: str
    grad: bool
    shape: list[int]
    rows: int

    @classmethod
    def of(cls, tensor: torch.Tensor, dim: int) -> _Description:
        dtype = str(tensor.dtype).removeprefix("torch.")
        grad = tensor.requires_grad and torch.is_grad_enabled()
        if dtype not in _DTYPES and not tensor.is_meta:
            return cls("dtype", dtype, grad, [], 0)
        if not 0 < tensor.dim() <= _MAX_DIMS or not -tensor.dim() <= dim < tensor.dim():
            return cls("dim", dtype, grad, [], 0)
        rows = 0 if has_no_samples() else tensor.shape[dim]
        return cls(None, dtype, grad, list(tensor.shape), rows)

    def lengths_except(self, dim: int) -> list[int]:
        """The lengths that have to be equal on all ranks: those of all dimensions but `dim`."""
        kept = list(self.shape)
        del kept[dim]
        return kept


def _compare(function: str, by_rank: Sequence[_Description], dim: int, uneven: str) -> None:
    for fault in ("dtype", "dim"):
        where = [rank for rank, one in enumerate(by_rank) if one.fault == fault]
        if where:
            raise _refusal(function, fault, format_ranks(where))
    different: list[tuple[str, Callable[[_Description], Any], str]] = [
        ("dtypes", lambda one: one.dtype, "convert them: x.to(torch.float32)"),
        ("numbers of dimensions", lambda one: len(one.shape), "bring equal shapes"),
        ("shapes", lambda one: one.lengths_except(dim), f"only dimension {dim} may differ"),
        (
            "requires_grad",
            lambda one: one.grad,
            "run the same code on every rank: a rank without it leaves the others waiting in"
            " backward; x.detach() on all ranks, or on none",
        ),
    ]
    if uneven == "error":
        different.append(
            ("numbers of rows", lambda one: one.rows, 'uneven="pad", or drop the short batch')
        )
    for what, value, fix in different:
        odd = [rank for rank, one in enumerate(by_rank) if value(one) != value(by_rank[0])]
        if odd:
            shown = "; ".join(
                f"rank {rank}: {tuple(one.shape)} {one.dtype}"
                f"{', requires grad' if one.grad else ''}"
                f"{', zero rows' if one.rows == 0 else ''}"
                for rank, one in enumerate(by_rank)
            )
            raise RowsDifferError(
                f"the ranks bring different {what} to {function}",
                where=f"{format_ranks(odd)} against rank 0",
                got=shown,
                fix=fix,
            )


def _refusal(function: str, fault: str, where: str) -> LockstepError:
    if fault == "dtype":
        return WrongTypeError(
            f"{function} moves gradients, and this tensor cannot have one",
            where=where,
            expected=", ".join(_DTYPES),
            got="integers, booleans or complex numbers",
            fix=_LABELS if function.startswith("lockstep.gather(") else "x.to(torch.float32)",
        )
    return WrongTypeError(
        f"{function} counts rows along a dimension that this tensor does not have",
        where=where,
        expected=f"1 to {_MAX_DIMS} dimensions, and dim one of them",
        # The mean of a rank's losses would count as one row, whatever their number.
        fix='for a scalar: the losses before their mean, as in cross_entropy(..., reduction="none")'
        if function.startswith("lockstep.global_mean(")
        else "x.unsqueeze(0) for a scalar, x.flatten(1) for a tensor of many dimensions",
    )


def _compare_settings(function: str, settings: Sequence[list[Any]]) -> None:
    odd = [rank for rank, one in enumerate(settings) if one != settings[0]]
    if odd:
        raise ConfigurationError(
            f"the ranks call {function} with different arguments",
            where=f"{format_ranks(odd)} against rank 0",
            cause="an argument depends on the rank, or ranks have come to different calls",
            fix="make the same calls in the same order on every rank",
        )


def format_ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
