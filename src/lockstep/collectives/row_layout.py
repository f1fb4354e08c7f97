# SPDX-License-Identifier: Apache-2.0
"""Before rows move: do the ranks bring what fits together, may they call this here at all?

Gloo ends the whole process when ranks bring tensors of different sizes to one collective, and
there is nobody left to say so. So a description of fixed size travels first. What one rank
alone sees to be wrong travels in it too, and is refused by all, so that nobody waits.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

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

MAX_DIMS: Final = 8
DTYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NO_WEIGHT: Final = -1.0
_tickets = itertools.count(1)

# What a rank alone finds wrong, by its number in the description.
_FINE, _NOT_FLOATING, _SCALAR, _TOO_MANY_DIMS = range(4)


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
class Agreed:
    """What all ranks know after their descriptions have met.

    Attributes:
        rows: of every rank, of the first tensor.
        others: of every rank, of the further tensors.
        tickets: the number that each rank gave this call, to know its backward by.
        weights: of the batch in each rank's hand; None where nobody said.
    """

    rows: tuple[int, ...]
    tickets: tuple[int, ...]
    weights: tuple[float | None, ...]
    extras: tuple[tuple[float, ...], ...]
    others: tuple[tuple[int, ...], ...] = ()

    def with_rows(self, rows: Sequence[int]) -> Agreed:
        """The same agreement over other rows."""
        return replace(self, rows=tuple(rows), others=())

    def span(self, rank: int) -> slice:
        """Where the rows of `rank` stand among all."""
        start = sum(self.rows[:rank])
        return slice(start, start + self.rows[rank])

    @property
    def total(self) -> int:
        return sum(self.rows)

    @property
    def longest(self) -> int:
        return max(self.rows)

    @property
    def are_even(self) -> bool:
        return len(set(self.rows)) == 1


def agree_on_rows(
    group: Group,
    function: str,
    tensors: Sequence[torch.Tensor],
    *,
    dim: int = 0,
    uneven: str = "pad",
    settings: Sequence[float] = (),
    extras: Sequence[float] = (),
) -> Agreed:
    """Compare what the ranks bring, on all of them, before anything of it moves.

    Args:
        function: as the user calls it.
        tensors: the first one's length along `dim` counts as this rank's rows. Everything
            else about them has to be equal on all ranks.
        uneven: "error" refuses ranks with different numbers of rows.
        settings: further numbers that have to be equal on all ranks.
        extras: further numbers that may differ; returned for every rank.

    Gradient:
        None: metadata only.

    Collective:
        Every rank, same order. Blocks. One small all-gather.

    Raises:
        WrongTypeError: something else than floating-point numbers, on any rank.
        RowsDifferError: the tensors do not fit together; names the ranks.
        ConfigurationError: the settings differ.
    """
    weight = reduction_context.delivered_weight()
    record = [float(next(_tickets)), _NO_WEIGHT if weight is None else weight]
    record += _filled(extras, _EXTRAS)
    record += _filled([zlib.crc32(function.encode()), *settings], _SETTINGS)
    for tensor in tensors:
        record += _described(tensor, dim)
    sent = torch.tensor(_filled(record, _RECORD), dtype=torch.float64, device=group.device)
    everyone = [part.tolist() for part in group.all_gather(sent)]
    _compare_settings(function, [one[2 + _EXTRAS : _HEAD] for one in everyone])
    for position in range(len(tensors)):
        start = _HEAD + position * _LENGTH
        shapes = [_Shape.read(one[start : start + _LENGTH]) for one in everyone]
        _compare(function, shapes, dim, uneven, first=position == 0)
    rows, *others = (
        tuple(int(one[_HEAD + (position + 1) * _LENGTH - 1]) for one in everyone)
        for position in range(len(tensors))
    )
    if sum(rows) == 0:
        raise RowsDifferError(
            f"{function} was given no row by any rank",
            got="zero rows on " + ranks_named(range(group.size)),
            cause="a loss over nothing is NaN",
            fix="leave out a step for which no rank has a sample",
        )
    return Agreed(
        rows,
        tuple(int(one[0]) for one in everyone),
        tuple(None if one[1] == _NO_WEIGHT else one[1] for one in everyone),
        tuple(tuple(one[2 : 2 + len(extras)]) for one in everyone),
        tuple(others),
    )


# A description: fault, dtype, requires_grad, dimensions, their lengths, rows (zero if borrowed).
_LENGTH: Final = 4 + MAX_DIMS + 1
# One size for all functions: ranks that have come to different ones must still meet.
_EXTRAS, _SETTINGS = 4, 6
_HEAD: Final = 2 + _EXTRAS + _SETTINGS
_RECORD: Final = _HEAD + 2 * _LENGTH


def _filled(numbers: Sequence[float], length: int) -> list[float]:
    assert len(numbers) <= length
    return [*map(float, numbers), *[0.0] * (length - len(numbers))]


def _described(tensor: torch.Tensor, dim: int) -> list[float]:
    if tensor.dtype not in DTYPES:
        return [_NOT_FLOATING, *[0.0] * (_LENGTH - 1)]
    if not 0 < tensor.dim() <= MAX_DIMS or not -tensor.dim() <= dim < tensor.dim():
        fault = _TOO_MANY_DIMS if tensor.dim() > MAX_DIMS else _SCALAR
        return [fault, 0.0, 0.0, float(tensor.dim()), *[0.0] * (_LENGTH - 4)]
    grad = tensor.requires_grad and torch.is_grad_enabled()
    lengths = [*tensor.shape, *[0] * (MAX_DIMS - tensor.dim())]
    rows = 0 if brings_nothing() else tensor.shape[dim]
    numbers = [_FINE, DTYPES.index(tensor.dtype), grad, tensor.dim(), *lengths, rows]
    return [float(number) for number in numbers]


@dataclass(frozen=True)
class _Shape:
    """One rank's description, readable again."""

    fault: int
    dtype: torch.dtype
    grad: bool
    lengths: tuple[int, ...]
    rows: int

    @classmethod
    def read(cls, numbers: list[float]) -> _Shape:
        fault, dtype, grad, dims, *lengths, rows = map(int, numbers)
        return cls(fault, DTYPES[dtype], bool(grad), tuple(lengths[:dims]), rows)

    def across(self, dim: int) -> tuple[int, ...]:
        """The lengths that have to be equal: all but the rows'."""
        kept = list(self.lengths)
        del kept[dim]
        return tuple(kept)


def _compare(function: str, shapes: list[_Shape], dim: int, uneven: str, *, first: bool) -> None:
    _refuse_faults(function, shapes)
    different: list[tuple[str, Callable[[_Shape], Any], str]] = [
        ("dtypes", lambda one: one.dtype, "convert them: x.to(torch.float32)"),
        ("numbers of dimensions", lambda one: len(one.lengths), "bring equal shapes"),
        ("shapes", lambda one: one.across(dim), f"only dimension {dim} may differ"),
        (
            "requires_grad",
            lambda one: one.grad,
            "run the same code on every rank: a rank without it leaves the others waiting in"
            " backward; x.detach() on all ranks, or on none",
        ),
    ]
    if uneven == "error" and first:
        different.append(
            ("numbers of rows", lambda one: one.rows, 'uneven="pad", or drop the short batch')
        )
    for what, value, fix in different:
        values = [value(shape) for shape in shapes]
        if any(other != values[0] for other in values):
            shown = "; ".join(
                f"rank {rank}: {tuple(shape.lengths)} {str(shape.dtype).removeprefix('torch.')}"
                f"{', requires grad' if shape.grad else ''}"
                f"{', zero rows' if shape.rows == 0 else ''}"
                for rank, shape in enumerate(shapes)
            )
            odd = [rank for rank, other in enumerate(values) if other != values[0]]
            raise RowsDifferError(
                f"the ranks bring different {what} to {function}",
                where=f"{ranks_named(odd)} against rank 0",
                got=shown,
                fix=fix,
            )


def _refuse_faults(function: str, shapes: list[_Shape]) -> None:
    for fault in (_NOT_FLOATING, _SCALAR, _TOO_MANY_DIMS):
        where = [rank for rank, shape in enumerate(shapes) if shape.fault == fault]
        if where:
            raise _fault(function, fault, ranks_named(where))


def _fault(function: str, fault: int, where: str) -> LockstepError:
    if fault == _NOT_FLOATING:
        return WrongTypeError(
            f"{function} moves gradients, and this tensor cannot have one",
            where=where,
            expected=", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES),
            got="integers, booleans or complex numbers",
            fix=f"for labels: {function.split('(')[0]}(labels.double()).long(), or"
            " torch.distributed.all_gather",
        )
    return WrongTypeError(
        f"{function} gathers along a dimension that this tensor does not have",
        where=where,
        expected=f"1 to {MAX_DIMS} dimensions, and dim one of them",
        fix="x.unsqueeze(0) for a scalar, x.flatten(1) for a tensor of many dimensions",
    )


def _compare_settings(function: str, settings: list[list[float]]) -> None:
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
