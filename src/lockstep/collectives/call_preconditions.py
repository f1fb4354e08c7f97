# SPDX-License-Identifier: Apache-2.0
"""Before rows move: may this function be called here, and do the ranks' tensors fit together?

Gloo ends the whole process when ranks bring tensors of different sizes to one collective, and
no process is left to say so. So every rank first sends a description of its tensors. A fault
that one rank alone sees travels in the description too, and all ranks refuse it, so that none of
them waits for another.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from lockstep import reduction_context
from lockstep.errors import (
    ConfigurationError,
    LockstepError,
    PerShardLossError,
    RowsDifferError,
    WrongTypeError,
    WrongUseError,
)
from lockstep.group import Group, resolve_group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_DIMS: Final = 8
_DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
_tickets = itertools.count(1)


def ranks_of(function: str, group: Any) -> Group:
    """The ranks that `function` works over, where it may be called.

    Raises:
        PerShardLossError: only one shard of the global batch is being computed.
        WrongUseError: there is no process group.
    """
    current = reduction_context.active()
    if current is not None and current.per_shard:
        raise PerShardLossError(
            f"{function} sees one shard here, and means the whole global batch",
            cause="the operator's loss is computed shard by shard",
            fix="write `joint_loss = True` in the operator: its worker's shards then go through"
            " as one batch",
        )
    if group is not None:
        return resolve_group(group)
    if current is not None:
        return current.group
    found = resolve_group(None)
    if found.is_alone:
        raise WrongUseError(
            f"{function} was called without a process group",
            cause="the program was not started by torchrun, or has not called"
            " init_process_group yet",
            fix="torch.distributed.init_process_group(), or for a process alone"
            " group=lockstep.group.Group(None)",
        )
    return found


def refuse_sums(function: str) -> None:
    """Raise if the losses of all ranks are added up: a loss that all return counts N times.

    Raises:
        ConfigurationError: the operator's ``loss_reduction`` is "sum".
    """
    current = reduction_context.active()
    if current is not None and not current.averages:
        raise ConfigurationError(
            f"{function} returns the loss of the whole global batch on every worker, and"
            ' loss_reduction="sum" would add them up',
            fix='loss_reduction = "mean" in the operator',
        )


def brings_nothing() -> bool:
    """Whether the batch in hand is borrowed: its rows belong to another rank."""
    current = reduction_context.active()
    return current is not None and current.weight == 0.0


@dataclass(frozen=True)
class RowLayout:
    """How many rows each rank brings to one call, and what else the ranks have told each other.

    Attributes:
        counts: of the first tensor's rows, by rank.
        tickets: the number that each rank gave this call, to know its backward by.
        weights: of the batch that each rank has in hand; None for a rank that was told of none.
        extras: of `agree_on_rows`, by rank.
        others: the further tensors' `counts`.
    """

    counts: tuple[int, ...]
    tickets: tuple[int, ...]
    weights: tuple[float | None, ...]
    extras: tuple[list[Any], ...]
    others: tuple[tuple[int, ...], ...] = ()

    def with_counts(self, counts: Sequence[int]) -> RowLayout:
        """The same call over other rows."""
        return replace(self, counts=tuple(counts), others=())

    def span(self, rank: int) -> slice:
        """Where the rows of `rank` stand among all."""
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
        """Every rank brings as many rows."""
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
        WrongTypeError: something else than floating-point numbers, on any rank.
        RowsDifferError: the tensors do not fit together; names the ranks.
        ConfigurationError: the settings differ.
    """
    called = [function, *settings]
    described = [_Description.of(tensor, dim) for tensor in tensors]
    mine = [called, next(_tickets), reduction_context.delivered_weight(), extras, described]
    calls, tickets, weights, all_extras, descriptions = zip(*group.exchange(mine), strict=True)
    _compare_settings(function, calls)
    by_tensor = [[_Description(*one) for one in ranks] for ranks in zip(*descriptions, strict=True)]
    for position, by_rank in enumerate(by_tensor):
        _compare(function, by_rank, dim, uneven if position == 0 else "pad")
    rows, *others = (tuple(one.rows for one in by_rank) for by_rank in by_tensor)
    if sum(rows) == 0:
        raise RowsDifferError(
            f"{function} was given no row by any rank",
            got="zero rows on " + ranks_named(range(group.size)),
            cause="a loss over nothing is NaN",
            fix="leave out a step for which no rank has a sample",
        )
    return RowLayout(rows, tickets, weights, all_extras, tuple(others))


class _Description(NamedTuple):
    """One tensor, as its rank describes it to the others.

    Attributes:
        fault: "dtype" or "dim" where the tensor cannot be gathered at all.
        rows: its length along `dim`; zero if the batch is borrowed.
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
        if dtype not in _DTYPES:
            return cls("dtype", dtype, grad, [], 0)
        if not 0 < tensor.dim() <= _MAX_DIMS or not -tensor.dim() <= dim < tensor.dim():
            return cls("dim", dtype, grad, [], 0)
        rows = 0 if brings_nothing() else tensor.shape[dim]
        return cls(None, dtype, grad, list(tensor.shape), rows)

    def across(self, dim: int) -> list[int]:
        """The lengths that have to be equal: all but the rows'."""
        kept = list(self.shape)
        del kept[dim]
        return kept


def _compare(function: str, by_rank: Sequence[_Description], dim: int, uneven: str) -> None:
    for fault in ("dtype", "dim"):
        where = [rank for rank, one in enumerate(by_rank) if one.fault == fault]
        if where:
            raise _refusal(function, fault, ranks_named(where))
    different: list[tuple[str, Callable[[_Description], Any], str]] = [
        ("dtypes", lambda one: one.dtype, "convert them: x.to(torch.float32)"),
        ("numbers of dimensions", lambda one: len(one.shape), "bring equal shapes"),
        ("shapes", lambda one: one.across(dim), f"only dimension {dim} may differ"),
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
                where=f"{ranks_named(odd)} against rank 0",
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
            fix=f"for labels: {function.split('(')[0]}(labels.double()).long(), or"
            " torch.distributed.all_gather",
        )
    return WrongTypeError(
        f"{function} gathers along a dimension that this tensor does not have",
        where=where,
        expected=f"1 to {_MAX_DIMS} dimensions, and dim one of them",
        fix="x.unsqueeze(0) for a scalar, x.flatten(1) for a tensor of many dimensions",
    )


def _compare_settings(function: str, settings: Sequence[list[Any]]) -> None:
    odd = [rank for rank, one in enumerate(settings) if one != settings[0]]
    if odd:
        raise ConfigurationError(
            f"the ranks call {function} with different arguments",
            where=f"{ranks_named(odd)} against rank 0",
            cause="an argument depends on the rank, or ranks have come to different calls",
            fix="make the same calls in the same order on every rank",
        )


def ranks_named(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
