# SPDX-License-Identifier: Apache-2.0
"""A block of similarities, and its gradient, computed tile by tile.

The matrix S = scale * rows @ columns.T never exists as a whole. A tile is computed, used for both
of its directions while it is in the processor's cache, and overwritten by the next one. Backward
computes it again.

Tiles hold S log2(e), and powers of two are taken of them: on the CPU torch's ``exp2`` takes a
quarter of the time of ``exp`` (2.13, AVX2), and the factor is free in the product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tile = tuple[int, int]

LOG2_E: Final = 1 / math.log(2)

_FARTHEST: Final = 40.0
"""Exponents at most this far apart may share one power of two: float32 still holds 2^-40."""
_VANISHING: Final = 2.0**-_FARTHEST


def strips_of(span: slice, length: int) -> list[slice]:
    """`span` cut into slices of `length`; the last one may be shorter."""
    return [
        slice(start, min(start + length, span.stop))
        for start in range(span.start, span.stop, length)
    ]


@dataclass(frozen=True)
class Similarities:
    """The block S, as the tensors that it is made from.

    Attributes:
        rows: shape (R, D).
        columns: shape (C, D).
        scale: a number.
        own: if given, row i and column `own` + i are one sample, and this entry is left out.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    scale: float
    tile: Tile
    own: int | None = None

    def tile_of(self, strip: slice, part: slice, buffer: torch.Tensor) -> torch.Tensor:
        """S log2(e) of some rows and some columns, in `buffer`."""
        tile = buffer[: strip.stop - strip.start, : part.stop - part.start]
        torch.mm(self.rows[strip] * (self.scale * LOG2_E), self.columns[part].T, out=tile)
        if self.own is not None:
            # Where the diagonal of the whole begins in this tile; it may miss it altogether.
            offset = self.own + strip.start - part.start
            if -tile.shape[0] < offset < tile.shape[1]:
                tile.diagonal(offset).fill_(-math.inf)
        return tile

    def scratch(self) -> torch.Tensor:
        """Uninitialised memory for one tile."""
        height, width = self.tile
        return self.rows.new_empty(min(height, len(self.rows)), min(width, len(self.columns)))

    def strips(self) -> list[slice]:
        """The rows, in the heights of tiles."""
        return strips_of(slice(0, len(self.rows)), self.tile[0])

    def parts(self) -> list[slice]:
        """The columns, in the widths of tiles."""
        return strips_of(slice(0, len(self.columns)), self.tile[1])

    def scaled(self, strip: slice) -> torch.Tensor:
        return self.rows[strip] * self.scale

    def of_pairs(self, positives: torch.Tensor | slice) -> torch.Tensor:
        """S[i, positives[i]] for every row, shape (R,)."""
        found = self.rows.new_empty(len(self.rows))
        for strip in self.strips():
            partners = self.columns[_part(positives, strip)]
            found[strip] = (self.scaled(strip) * partners).sum(1)
        return found


class RunningLogSumExp:
    """Running log sum exp of the rows or the columns; each tile is added to it.

    Attributes:
        exponent: by row or column, about the largest base-2 exponent of the entries so far.
        sum: of the exponentials, over 2^exponent.
    """

    def __init__(self, like: torch.Tensor, length: int) -> None:
        self.exponent = like.new_full((length,), -math.inf)
        self.sum = like.new_zeros(length)

    def add(self, part: slice, tile: torch.Tensor, dim: int, scratch: torch.Tensor) -> None:
        """Take in `tile`, whose entries along `dim` belong together; overwrites `scratch`."""
        before = self.exponent[part]
        largest = torch.maximum(before, tile.amax(dim))
        # Only left-out entries so far: minus infinity from itself would be NaN.
        shift = torch.where(largest == -math.inf, 0.0, largest)
        self.sum[part] *= (before - shift).exp2_()
        torch.sub(tile, shift.unsqueeze(dim), out=scratch)
        self.sum[part] += scratch.exp2_().sum(dim)
        self.exponent[part] = largest

    def add_sums(self, part: slice, sums: torch.Tensor, shift: torch.Tensor) -> None:
        """Take in sums of 2^(entry - `shift`), none of which is near zero."""
        before = self.exponent[part]
        # The largest sum stands in for the largest entry: it is larger by at most the number of
        # entries, which is near enough to scale `sum`.
        largest = torch.maximum(before, shift + sums.log2())
        self.sum[part] = (
            self.sum[part] * (before - largest).exp2_() + sums * (shift - largest).exp2_()
        )
        self.exponent[part] = largest

    def logarithm(self) -> torch.Tensor:
        """The natural logarithm of the sums."""
        return (self.exponent + self.sum.log2()) / LOG2_E


def sums_of_exponentials(
    block: Similarities, *, of_columns: bool
) -> tuple[RunningLogSumExp, RunningLogSumExp]:
    """Sums for log sum exp over each row, and over this block's part of each column.

    Returns:
        For the rows, and for the columns (untouched without `of_columns`).
    """
    of_rows = RunningLogSumExp(block.rows, len(block.rows))
    columns = RunningLogSumExp(block.rows, len(block.columns))
    buffer, scratch = block.scratch(), block.scratch()
    for strip in block.strips():
        for part in block.parts():
            tile = block.tile_of(strip, part, buffer)
            memory = scratch[: tile.shape[0], : tile.shape[1]]
            if of_columns and _add_both(of_rows, strip, columns, part, tile, memory):
                continue
            of_rows.add(strip, tile, 1, memory)
            if of_columns:
                columns.add(part, tile, 0, memory)
    return of_rows, columns


def _add_both(
    rows: RunningLogSumExp,
    strip: slice,
    columns: RunningLogSumExp,
    part: slice,
    tile: torch.Tensor,
    memory: torch.Tensor,
) -> bool:
    """Add `tile` to both sums, with one exponential of each entry; False if that is not exact.

    It is exact if no row and no column lies so far below the tile's largest entry that its
    exponentials underflow. Always False on a GPU, where the host would wait to read the check.
    """
    if tile.device.type != "cpu":
        return False
    shift = tile.amax(1).amax()
    torch.sub(tile, shift, out=memory).exp2_()
    by_row = torch.mv(memory, memory.new_ones(memory.shape[1]))
    by_column = torch.mv(memory.T, memory.new_ones(memory.shape[0]))
    # A NaN, too, returns False.
    if not min(by_row.amin().item(), by_column.amin().item()) > _VANISHING:
        return False
    rows.add_sums(strip, by_row, shift)
    columns.add_sums(part, by_column, shift)
    return True


@dataclass(frozen=True)
class Coefficients:
    """dL/dS = by_row[i] exp(S[i, j] - log_rows[i]) + by_column[j] exp(S[i, j] - log_columns[j]),
    and minus on_pair[i] at each row's positive.

    A coefficient that is equal for all rows (or columns) is a float: callers pass 1.0, and multiply
    the result once.
    """

    log_rows: torch.Tensor
    log_columns: torch.Tensor | None
    by_row: torch.Tensor | float
    by_column: torch.Tensor | float
    on_pair: torch.Tensor | float

    def with_one_exponential(self) -> OneExponential | None:
        """The same with one exponential; None if that is not exact, or on a GPU (it would wait)."""
        if self.log_columns is None or self.log_rows.device.type != "cpu":
            return None
        if len(self.log_rows) == 0:
            return None
        of_rows, of_columns = self.log_rows * LOG2_E, self.log_columns * LOG2_E
        shift = of_rows.amax()
        lowest = torch.minimum(of_rows.amin(), of_columns.amin())
        if not (shift - lowest).item() <= _FARTHEST:
            return None
        return OneExponential(
            shift,
            (shift - of_rows).exp2_() * self.by_row,
            (shift - of_columns).exp2_() * self.by_column,
        )


@dataclass(frozen=True)
class OneExponential:
    """dL/dS = 2^(S[i, j] log2(e) - shift) (of_rows[i] + of_columns[j]), but for the positives.

    No entry exceeds `shift`: each is at most its row's log sum exp.
    """

    shift: torch.Tensor
    of_rows: torch.Tensor
    of_columns: torch.Tensor

    def differentiate(
        self, tile: torch.Tensor, memory: torch.Tensor, strip: slice, part: slice
    ) -> None:
        """Overwrite the similarities of a tile."""
        torch.add(self.of_rows[strip].unsqueeze(1), self.of_columns[part], out=memory)
        tile.sub_(self.shift).exp2_().mul_(memory)


def gradients(
    block: Similarities,
    positives: torch.Tensor | slice,
    coefficients: Coefficients,
    *,
    parts: Sequence[slice],
    deliver: Callable[[slice, torch.Tensor], None] | None,
) -> torch.Tensor:
    """The gradient of the rows without its factor `scale`, and, part by part, of the columns.

    Args:
        positives: each row's column.
        parts: the columns, cut as their gradient is to be delivered; none wider than a tile.
        deliver: gets each part and scale * (dL/dS).T @ rows of it, a tensor to keep.

    Returns:
        dL/dS @ columns, shape (R, D).
    """
    by_rows = torch.zeros_like(block.rows)
    buffer, scratch = block.scratch(), block.scratch()
    shared = coefficients.with_one_exponential()
    for part in parts:
        columns = block.columns[part]
        by_columns = None if deliver is None else torch.zeros_like(columns)
        for strip in block.strips():
            tile = block.tile_of(strip, part, buffer)
            memory = scratch[: tile.shape[0], : tile.shape[1]]
            if shared is None:
                _differentiate(tile, memory, strip, part, coefficients)
            else:
                shared.differentiate(tile, memory, strip, part)
            by_rows[strip].addmm_(tile, columns)
            if by_columns is not None:
                by_columns.addmm_(tile.T, block.scaled(strip))
        _subtract_pairs(block, positives, part, coefficients.on_pair, by_rows, by_columns)
        if deliver is not None and by_columns is not None:
            deliver(part, by_columns)
    return by_rows


def _differentiate(
    tile: torch.Tensor, memory: torch.Tensor, strip: slice, part: slice, given: Coefficients
) -> None:
    """Overwrite the similarities of a tile with the loss's gradient, but for the positives."""
    if given.log_columns is not None:
        torch.sub(tile, given.log_columns[part] * LOG2_E, out=memory)
        _times(memory.exp2_(), given.by_column, part, 0)
    tile.sub_((given.log_rows[strip] * LOG2_E).unsqueeze(1))
    _times(tile.exp2_(), given.by_row, strip, 1)
    if given.log_columns is not None:
        tile.add_(memory)


def _times(tile: torch.Tensor, factor: torch.Tensor | float, part: slice, dim: int) -> None:
    if isinstance(factor, torch.Tensor):
        tile.mul_(factor[part].unsqueeze(dim))
    elif factor != 1.0:
        tile.mul_(factor)


def _subtract_pairs(
    block: Similarities,
    positives: torch.Tensor | slice,
    part: slice,
    weight: torch.Tensor | float,
    by_rows: torch.Tensor,
    by_columns: torch.Tensor | None,
) -> None:
    """Subtract the term of each pair whose column is in `part` from both gradients, by strips."""
    for strip in block.strips():
        here, there = _pairs(positives, strip, part)
        each = weight[here].unsqueeze(1) if isinstance(weight, torch.Tensor) else weight
        if isinstance(here, slice) and isinstance(there, slice):
            if here.start >= here.stop:
                continue
            by_rows[here].sub_(block.columns[there] * each)
            if by_columns is not None:
                inside = slice(there.start - part.start, there.stop - part.start)
                by_columns[inside].sub_(block.scaled(here) * each)
        elif isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor):
            by_rows.index_add_(0, here, block.columns[there] * each, alpha=-1)
            if by_columns is not None:
                taken = block.rows[here] * (block.scale * each)
                by_columns.index_add_(0, there - part.start, taken, alpha=-1)


def _pairs(
    positives: torch.Tensor | slice, strip: slice, part: slice
) -> tuple[torch.Tensor | slice, torch.Tensor | slice]:
    """The rows of `strip` whose positives are in `part`, and these positives."""
    if isinstance(positives, slice):
        first = max(part.start, positives.start + strip.start)
        last = min(part.stop, positives.start + strip.stop)
        return slice(first - positives.start, last - positives.start), slice(first, last)
    found = positives[strip]
    inside = ((found >= part.start) & (found < part.stop)).nonzero().squeeze(1)
    return inside + strip.start, found[inside]


def _part(positives: torch.Tensor | slice, strip: slice) -> torch.Tensor | slice:
    if isinstance(positives, slice):
        return slice(positives.start + strip.start, positives.start + strip.stop)
    return positives[strip]
