# SPDX-License-Identifier: Apache-2.0
"""`Equations`: sampled elements of what was used in a step, and of what it may be a mixture of."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.shared_track import EPSILON

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lockstep.audit.facts import Backward, Parameter, Step
    from lockstep.audit.shared_track import Shared, SharedTrack

Numbers = np.ndarray[Any, Any]

_ROUNDINGS: Final = {"float16": 4.0, "bfloat16": 4.0}
_ROUNDINGS_OTHERWISE: Final = 64.0
"""So many roundings may lie between what autograd delivered and what the optimizer used."""
_OF_DIFFERENCES: Final = 1e-3
"""A move is a small difference of large numbers."""


def tolerance(dtype: str) -> float:
    """By how much a sum of a few numbers of `dtype` may be off, relative to its terms."""
    return _ROUNDINGS.get(dtype, _ROUNDINGS_OTHERWISE) * EPSILON.get(dtype, EPSILON["float32"])


LEFT: Final = -1


@dataclass(frozen=True)
class Column:
    """One unknown: what backward number `backward` of the step brought on rank `rank`, or `LEFT`:
    what was in ``parameter.grad`` when the first one began.
    """

    rank: int
    backward: int


@dataclass(frozen=True)
class Equations:
    """The sampled elements of one step: S of them, on R ranks.

    Attributes:
        ranks: the R ranks.
        columns: what the K columns are.
        local: (S, K), what autograd brought; 0 where it brought nothing.
        used: (R, S), what the optimizers used; NaN where a rank has not got the element.
        parameter: (S,), of which parameter each is, by its place in the track's list.
        unit: (S,), in which row of the parameter.
        close: (S,), the tolerance of its dtype.
    """

    ranks: list[int]
    columns: list[Column]
    local: Numbers
    used: Numbers
    parameter: Numbers
    unit: Numbers
    close: Numbers

    def of(self, parameters: Sequence[int]) -> Equations:
        """Those of some parameters only."""
        return self._at(np.isin(self.parameter, list(parameters)))

    def units(self) -> Iterator[Equations]:
        """Those of each row of each parameter."""
        both = zip(self.parameter.tolist(), self.unit.tolist(), strict=True)
        for place, unit in sorted(set(both)):
            yield self._at((self.parameter == place) & (self.unit == unit))

    def _at(self, keep: Numbers) -> Equations:
        names = ("local", "parameter", "unit", "close")
        kept = {name: getattr(self, name)[keep] for name in names}
        return replace(self, used=self.used[:, keep], **kept)

    @property
    def parameters(self) -> list[int]:
        """The places of those that they are about."""
        return sorted(set(self.parameter.tolist()))

    def of_those_that_brought(self) -> Equations:
        """Without the columns that brought these parameters nothing."""
        brought: list[bool] = (self.local != 0.0).any(axis=0).tolist()
        return replace(
            self,
            columns=[c for c, there in zip(self.columns, brought, strict=True) if there],
            local=self.local[:, brought],
        )


def of_gradients(track: SharedTrack, number: int) -> Equations | None:
    """What the optimizers used in a step, of what its backwards brought; None without backwards."""
    brought: dict[Column, Numbers] = {}
    used: dict[int, Numbers] = {}
    for rank, step in track.steps(number).items():
        backwards = list(bringing(step, track.key))
        if step.gradients is None or not backwards:
            return None
        # Backwards brought gradients of the scaled loss.
        used[rank] = step.gradients.samples * (step.scale or 1.0)
        for place, backward in enumerate(backwards):
            brought[Column(rank, place)] = backward.local[track.key].samples
        left = backwards[0].before.get(track.key)
        if left is not None and np.nan_to_num(left.norms).any():
            brought[Column(rank, LEFT)] = left.samples
    return _equations(track, brought, used)


def of_weights(track: SharedTrack, number: int) -> Equations | None:
    """What the ranks' weights are when a step begins, of what they were after the step before."""
    left: dict[Column, Numbers] = {}
    begun: dict[int, Numbers] = {}
    before = track.steps(number - 1)
    for rank, step in track.steps(number).items():
        last = before.get(rank)
        if step.entry is None or last is None or last.exit is None:
            return None
        left[Column(rank, 0)] = last.exit.samples
        begun[rank] = step.entry.samples
    return _equations(track, left, begun)


def of_moves(outer: SharedTrack, number: int, inner: SharedTrack, end: int) -> Equations | None:
    """What an outer optimizer used in a step, of what each rank's weights have moved.

    From where that step begins to where step `end` of `inner`, which trains a copy, has left them.
    """
    moves: dict[Column, Numbers] = {}
    used: dict[int, Numbers] = {}
    ends = inner.steps(end)
    for rank, step in outer.steps(number).items():
        last = ends.get(rank)
        if step.entry is None or step.gradients is None or last is None or last.exit is None:
            return None
        if last.exit.samples.shape != step.entry.samples.shape:
            return None
        moves[Column(rank, 0)] = step.entry.samples - last.exit.samples
        used[rank] = step.gradients.samples
    return _equations(outer, moves, used, _OF_DIFFERENCES)


def _equations(
    track: SharedTrack,
    known: dict[Column, Numbers],
    used: dict[int, Numbers],
    close_at_least: float = 0.0,
) -> Equations | None:
    ranks = track.ranks
    if list(used) != ranks:
        return None
    columns = list(known)
    rows: list[list[Numbers]] = [[] for _ in known]
    results: list[list[Numbers]] = [[] for _ in ranks]
    parameter: list[int] = []
    unit: list[int] = []
    close: list[float] = []
    for place, shared in enumerate(track.held):
        if not _is_shared_by(shared, ranks):
            continue
        of_rank = {rank: track.samples_at(shared, rank) for rank in ranks}
        if len({s.stop - s.start for s in of_rank.values()}) > 1:
            continue
        for column, values in zip(columns, rows, strict=True):
            values.append(known[column][of_rank[column.rank]])
        for rank, values in zip(ranks, results, strict=True):
            values.append(used[rank][of_rank[rank]])
        count = of_rank[ranks[0]].stop - of_rank[ranks[0]].start
        parameter += [place] * count
        unit += _rows_of_samples(next(iter(shared.described.values())), count)
        close += [max(tolerance(shared.dtype), close_at_least)] * count
    if not parameter:
        return None
    local = np.array([np.concatenate(values) for values in rows]).T
    whole = Equations(
        ranks,
        columns,
        np.where(np.isnan(local), 0.0, local),
        np.array([np.concatenate(values) for values in results]),
        np.array(parameter),
        np.array(unit),
        np.array(close),
    )
    # Before a GradScaler has found its scale, elements overflow.
    is_finite: Numbers = np.isfinite(whole.local)
    return whole._at(np.asarray(is_finite.all(axis=1)))


def bringing(step: Step, key: str) -> Iterator[Backward]:
    """The backwards of a step that brought an optimizer's parameters something."""
    return (backward for backward in step.backwards if key in backward.local)


def _is_shared_by(shared: Shared, ranks: Sequence[int]) -> bool:
    """Also where each has a piece; not where ranks reduce it in smaller groups."""
    whole = shared.groups in ([], [sorted(ranks)])
    pieces = all(p.sharded for p in shared.described.values())
    return set(ranks) <= set(shared.index) and (whole or pieces)


def _rows_of_samples(described: Parameter, count: int) -> list[int]:
    size, height = math.prod(described.shape), (described.shape or [1])[0]
    stride, width = max(1, size // max(count, 1)), max(1, size // max(height, 1))
    return [place * stride // width for place in range(count)]
