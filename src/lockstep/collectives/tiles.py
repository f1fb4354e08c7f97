# SPDX-License-Identifier: Apache-2.0
"""A block of similarities, and its gradient, tile by tile: no matrix of rows times columns.

S = scale * rows @ columns.T is never held. A tile is made, used for both of its directions
while it is in the processor's cache, and overwritten by the next. Backward makes it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Tile = tuple[int, int]


@dataclass(frozen=True)
class Similarities:
    """The block S, as the tensors that it is made from.

    Attributes:
        rows: shape (R, D).
        columns: shape (C, D).
        scale: a number.
        own: with it, row i is column `own` + i, and its similarity to itself is left out.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    scale: float
    tile: Tile
    own: int | None = None

    def tiles(self, scaled: torch.Tensor, first: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """The tiles of the rows `scaled`, which begin at `first`: their columns, and they."""
        buffer = scaled.new_empty(len(scaled), min(self.tile[1], len(self.columns)))
        for start in range(0, len(self.columns), self.tile[1]):
            part = slice(start, min(start + self.tile[1], len(self.columns)))
            tile = buffer[:, : part.stop - part.start]
            torch.mm(scaled, self.columns[part].T, out=tile)
            if self.own is not None:
                # Negative where the diagonal begins below the tile, empty where it misses it.
                offset = self.own + first - start
                if -len(scaled) < offset < tile.shape[1]:
                    tile.diagonal(offset).fill_(-math.inf)
            yield part, tile

    def scratch(self) -> torch.Tensor:
        """Room for one tile."""
        height, width = self.tile
        return self.rows.new_empty(min(height, len(self.rows)), min(width, len(self.columns)))

    def strips(self) -> Iterator[slice]:
        """The rows of one row of tiles after the other."""
        for start in range(0, len(self.rows), self.tile[0]):
            yield slice(start, min(start + self.tile[0], len(self.rows)))

    def scaled(self, strip: slice) -> torch.Tensor:
        return self.rows[strip] * self.scale

    def of_pairs(self, positives: torch.Tensor | slice) -> torch.Tensor:
        """S[i, positives[i]] for every row, shape (R,)."""
        found = self.rows.new_empty(len(self.rows))
        for strip in self.strips():
            partners = self.columns[_part(positives, strip)]
            found[strip] = (self.scaled(strip) * partners).sum(1)
        return found


class Sums:
    """log sum exp of the rows or the columns, while their tiles come by."""

    def __init__(self, like: torch.Tensor, length: int) -> None:
        self.largest = like.new_full((length,), -math.inf)
        self.sum = like.new_zeros(length)

    def add(self, part: slice, tile: torch.Tensor, dim: int, scratch: torch.Tensor) -> None:
        """Take in `tile`, whose entries along `dim` belong together."""
        before = self.largest[part]
        largest = torch.maximum(before, tile.amax(dim))
        # All left out so far: minus infinity from itself would be NaN.
        shift = torch.where(largest == -math.inf, 0.0, largest)
        self.sum[part] *= (before - shift).exp_()
        torch.sub(tile, shift.unsqueeze(dim), out=scratch)
        self.sum[part] += scratch.exp_().sum(dim)
        self.largest[part] = largest

    def logarithm(self) -> torch.Tensor:
        return self.largest + self.sum.log()


def sums_of_exponentials(block: Similarities, *, of_columns: bool) -> tuple[Sums, Sums]:
    """What is needed for log sum exp over each row, and over this block's part of each column.

    Returns:
        For the rows, and for the columns (untouched without `of_columns`).
    """
    of_rows = Sums(block.rows, len(block.rows))
    columns = Sums(block.rows, len(block.columns))
    scratch = block.scratch()
    for strip in block.strips():
        for part, tile in block.tiles(block.scaled(strip), strip.start):
            room = scratch[: tile.shape[0], : tile.shape[1]]
            of_rows.add(strip, tile, 1, room)
            if of_columns:
                columns.add(part, tile, 0, room)
    return of_rows, columns


@dataclass(frozen=True)
class Coefficients:
    """dL/dS = by_row[i] exp(S[i, j] - log_rows[i]) + by_column[j] exp(S[i, j] - log_columns[j]),
    and minus on_pair[i] at each row's positive.

    A coefficient that is the same everywhere is a number: multiplying can then wait.
    """

    log_rows: torch.Tensor
    log_columns: torch.Tensor | None
    by_row: torch.Tensor | float
    by_column: torch.Tensor | float
    on_pair: torch.Tensor | float


def gradients(
    block: Similarities,
    positives: torch.Tensor | slice,
    coefficients: Coefficients,
    *,
    of_columns: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradient of the rows without its factor `scale`, and that of the columns.

    Returns:
        dL/dS @ columns, shape (R, D); and scale * (dL/dS).T @ rows, shape (C, D), or None.
    """
    by_rows = torch.empty_like(block.rows)
    by_columns = torch.zeros_like(block.columns) if of_columns else None
    scratch = block.scratch()
    for strip in block.strips():
        scaled = block.scaled(strip)
        here = by_rows[strip].zero_()
        for part, tile in block.tiles(scaled, strip.start):
            room = scratch[: tile.shape[0], : tile.shape[1]]
            _differentiate(tile, room, strip, part, coefficients)
            here.addmm_(tile, block.columns[part])
            if by_columns is not None:
                by_columns[part].addmm_(tile.T, scaled)
        _subtract_pairs(block, strip, positives, coefficients, here, scaled, by_columns)
    return by_rows, by_columns


def _differentiate(
    tile: torch.Tensor, room: torch.Tensor, strip: slice, part: slice, given: Coefficients
) -> None:
    """Overwrite the similarities of a tile with the loss's gradient, but for the positives."""
    if given.log_columns is not None:
        torch.sub(tile, given.log_columns[part], out=room)
        _times(room.exp_(), given.by_column, part, 0)
    tile.sub_(given.log_rows[strip].unsqueeze(1))
    _times(tile.exp_(), given.by_row, strip, 1)
    if given.log_columns is not None:
        tile.add_(room)


def _times(tile: torch.Tensor, factor: torch.Tensor | float, part: slice, dim: int) -> None:
    if isinstance(factor, torch.Tensor):
        tile.mul_(factor[part].unsqueeze(dim))
    elif factor != 1.0:
        tile.mul_(factor)


def _subtract_pairs(
    block: Similarities,
    strip: slice,
    positives: torch.Tensor | slice,
    given: Coefficients,
    by_rows: torch.Tensor,
    scaled: torch.Tensor,
    by_columns: torch.Tensor | None,
) -> None:
    where = _part(positives, strip)
    weight = given.on_pair
    if isinstance(weight, torch.Tensor):
        weight = weight[strip].unsqueeze(1)
    by_rows.sub_(block.columns[where] * weight)
    if by_columns is None:
        return
    if isinstance(where, slice):
        by_columns[where].sub_(scaled * weight)
    else:
        by_columns.index_add_(0, where, scaled * weight, alpha=-1)


def _part(positives: torch.Tensor | slice, strip: slice) -> torch.Tensor | slice:
    if isinstance(positives, slice):
        return slice(positives.start + strip.start, positives.start + strip.stop)
    return positives[strip]
