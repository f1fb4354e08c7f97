# SPDX-License-Identifier: Apache-2.0
"""One optimizer as all ranks have it, and which of its parameters differ between ranks.

A parameter is compared among the ranks that hold it as replicas: not where it is a shard, not
where the program marked it or cuts its model up, within its group where it is reduced in a smaller
one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set

    from lockstep.audit.facts import Parameter, Step, Track
    from lockstep.audit.prints import Fingerprint

TABLE_ROWS: Final = 8
"""Of the two tables that show whether ranks train one model: gradients by rank, drift by step."""

Kind = Literal["entry", "gradients", "exit"]

EPSILON: Final = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
_ALLOWED: Final = {"gradients": 64.0, "entry": 8.0, "exit": 8.0}
"""In units of the dtype's rounding. Replicas are equal to the bit where nothing is wrong; kernels
that add up in another order are not a finding."""


_Seen = TypeVar("_Seen")


def side_by_side(
    of_ranks: Mapping[int, Iterable[_Seen]], kind: Callable[[_Seen], Hashable]
) -> list[dict[int, _Seen]]:
    """The k-th of a kind on each rank that has one, by rank, in the order of their first ones."""
    found: dict[tuple[Hashable, int], dict[int, _Seen]] = {}
    for rank, of_rank in of_ranks.items():
        seen: Counter[Hashable] = Counter()
        for one in of_rank:
            known = kind(one)
            found.setdefault((known, seen[known]), {})[rank] = one
            seen[known] += 1
    return list(found.values())


@dataclass(frozen=True)
class Shared:
    """A parameter that several ranks hold.

    `index` is its place in each rank's track; `groups` are the sets of ranks that should agree.
    """

    name: str
    index: dict[int, int]
    groups: list[list[int]]
    described: dict[int, Parameter]

    @property
    def dtype(self) -> str:
        return next(iter(self.described.values())).dtype

    @property
    def is_alone(self) -> bool:
        """Does every rank's group of those that share it consist of that rank?"""
        return all(p.group is not None and len(p.group) == 1 for p in self.described.values())

    @property
    def wrapper(self) -> str | None:
        return next((p.wrapper for p in self.described.values() if p.wrapper), None)


@dataclass(frozen=True)
class Difference:
    """One tensor that differs: its norm and its first sampled elements, by rank."""

    name: str
    norms: dict[int, float]
    samples: dict[int, list[float]]

    @property
    def ranks(self) -> list[int]:
        return sorted(self.norms)

    @property
    def largest(self) -> float:
        """The largest difference between two ranks' sampled elements."""
        table = np.array([self.samples[rank] for rank in self.ranks])
        if not table.size:
            return float("nan")
        return float(np.nanmax(table.max(axis=0) - table.min(axis=0)))


def names_of(differences: Sequence[Difference]) -> list[str]:
    """The parameters' names, each once."""
    return list(dict.fromkeys(d.name for d in differences))


class SharedTrack:
    """One optimizer as all ranks have it.

    Args:
        tracks: by rank.
        is_cut_off: the run failed, which is why some ranks took more steps than others. The steps
            that all ranks took are the same steps.
    """

    def __init__(
        self,
        key: str,
        tracks: dict[int, Track],
        world_size: int,
        is_cut_off: bool = False,
    ) -> None:
        self.key = key
        self.tracks = tracks
        self.world_size = world_size
        self.apart: frozenset[str] = frozenset()
        self.is_cut_off = is_cut_off
        self.at_home: frozenset[str] = frozenset()
        self.ranks = sorted(tracks)
        self.meets_again = False
        self._offsets = {
            rank: [0, *accumulate(p.samples for p in track.parameters)]
            for rank, track in tracks.items()
        }
        self._steps = {rank: {s.number: s for s in track.steps} for rank, track in tracks.items()}

    @property
    def first(self) -> Track:
        """As the first rank has it."""
        return next(iter(self.tracks.values()))

    @property
    def counts_differ(self) -> bool:
        """Did some ranks take more steps than others, so that their k-th steps are not the same?"""
        counts = {track.count for track in self.tracks.values()}
        return len(counts) > 1 and not self.is_cut_off

    @cached_property
    def parameters(self) -> list[Shared]:
        """What at least two ranks hold as replicas of one another."""
        return [shared for shared in self.held if shared.groups]

    @cached_property
    def held(self) -> list[Shared]:
        """What at least two ranks hold, by name and shape, whole or in pieces."""
        each = {rank: list(enumerate(track.parameters)) for rank, track in self.tracks.items()}
        found = []
        for held in side_by_side(each, lambda one: (one[1].name, tuple(one[1].shape))):
            described = {rank: param for rank, (_, param) in held.items()}
            name = next(iter(described.values())).name
            own = any(p.local for p in described.values())
            if len(held) > 1 and not own and name not in self.apart:
                index = {rank: place for rank, (place, _) in held.items()}
                found.append(Shared(name, index, self._groups(name, described), described))
        return found

    def _groups(self, name: str, described: dict[int, Parameter]) -> list[list[int]]:
        if any(p.sharded for p in described.values()):
            pieces = {tuple(r for r in p.group or () if r in described) for p in described.values()}
            return [list(g) for g in sorted(pieces) if len(g) > 1]
        declared = [p.group for p in described.values() if p.group] or self._reduced_in(name)
        smaller = [g for g in declared if 1 < len(g) < self.world_size]
        if not smaller:
            return [sorted(described)]
        unique = {tuple(r for r in g if r in described) for g in smaller}
        return [list(g) for g in sorted(unique) if len(g) > 1]

    def _reduced_in(self, name: str) -> list[list[int]]:
        return [
            call.group
            for track in self.tracks.values()
            for step in track.steps[:4]
            for call in step.collectives
            if call.parameter == name and call.group
        ]

    @cached_property
    def numbers(self) -> list[int]:
        """The steps that at least two ranks wrote down."""
        counts: dict[int, int] = {}
        for steps in self._steps.values():
            for number in steps:
                counts[number] = counts.get(number, 0) + 1
        return sorted(number for number, count in counts.items() if count > 1)

    def numbers_of(self, rank: int) -> list[int]:
        """The steps that one rank wrote down."""
        return sorted(self._steps[rank])

    def keep_apart(self, names: Set[str]) -> None:
        """No replicas of one another: see `apart_by_design` and `kept_at_home`."""
        self.apart |= names
        vars(self).pop("parameters", None)
        vars(self).pop("held", None)

    def step(self, rank: int, number: int) -> Step | None:
        """One rank's record of one step."""
        return self._steps[rank].get(number)

    def steps(self, number: int) -> dict[int, Step]:
        """Every rank's record of one step."""
        return {r: s[number] for r, s in self._steps.items() if number in s}

    def fed(self, number: int) -> Literal["same", "own"] | None:
        """Was each rank given the same in a step, or its own? None: neither, or not known."""
        fed = [step.fed for step in self.steps(number).values()]
        if None in fed or len(set(fed)) not in (1, len(fed)):
            return None
        return "same" if len(set(fed)) == 1 else "own"

    def changed_before_step(self, rank: int, number: int) -> bool:
        """Did a rank's step begin with other weights than its step before had left?"""
        before, step = self.step(rank, number - 1), self.step(rank, number)
        left = None if before is None else before.exit
        begun = None if step is None else step.entry
        if left is None or begun is None:
            return False
        return not np.array_equal(left.hashes, begun.hashes)

    def differences(self, kind: Kind, number: int) -> list[Difference]:
        """The tensors of that kind that differ in that step, between ranks that have one."""
        found = []
        for prints, shared, held, _ in self._held(kind, number):
            allowed = _ALLOWED[kind] * EPSILON.get(shared.dtype, 0.0)
            if len(held) > 1 and self._differ(prints, shared, held, allowed):
                norms = {r: float(prints[r].norms[shared.index[r]]) for r in held}
                samples = {r: self.sampled(prints[r], shared, r) for r in held}
                found.append(Difference(shared.name, norms, samples))
        return found

    def come_out_apart(self, number: int) -> bool:
        """Do replicas leave that step with other weights? Small dtypes to the bit.

        What rounding allows of a 16-bit weight is more than a step moves it: replicas that nobody
        synchronises would look equal. Ranks that average it in a step round the same number.
        """
        if self.differences("exit", number):
            return True
        return any(
            len({int(prints[rank].hashes[shared.index[rank]]) for rank in held}) > 1
            for prints, shared, held, _ in self._held("exit", number)
            if EPSILON.get(shared.dtype, 0.0) >= EPSILON["float16"]
        )

    def missing(self, kind: Kind, number: int) -> list[tuple[str, list[int], list[int]]]:
        """Tensors that are None on some ranks: name, ranks with, ranks without."""
        each = self._held(kind, number)
        return [(s.name, held, without) for _, s, held, without in each if held and without]

    def _held(
        self, kind: Kind, number: int
    ) -> Iterator[tuple[dict[int, Fingerprint], Shared, list[int], list[int]]]:
        """Of each parameter and group: the ranks that have such a tensor, and those without one."""
        prints = self._prints(kind, number)
        for shared in self.parameters:
            for group in shared.groups:
                known = [r for r in group if r in prints and r in shared.index]
                without = [r for r in known if prints[r].is_absent(shared.index[r])]
                yield prints, shared, [r for r in known if r not in without], without

    def _prints(self, kind: Kind, number: int) -> dict[int, Fingerprint]:
        found = {}
        for rank, steps in self._steps.items():
            step = steps.get(number)
            held = getattr(step, kind) if step is not None else None
            if held is not None and len(held.hashes) == len(self.tracks[rank].parameters):
                found[rank] = held
        return found

    def _differ(
        self, prints: dict[int, Fingerprint], shared: Shared, ranks: list[int], allowed: float
    ) -> bool:
        hashes = {int(prints[r].hashes[shared.index[r]]) for r in ranks}
        if len(hashes) == 1:
            return False
        norms = [float(prints[r].norms[shared.index[r]]) for r in ranks]
        if len({(n == n, abs(n) == float("inf")) for n in norms}) > 1:
            return True  # a NaN or an infinity on some ranks only
        if max(norms) - min(norms) > allowed * max(norms):
            return True
        table = np.array([self.sampled(prints[r], shared, r) for r in ranks])
        table = table[:, np.isfinite(table).all(axis=0)]  # pieces have some of the elements
        if not table.size:
            return False
        spread = float(np.max(table.max(axis=0) - table.min(axis=0)))
        return spread > allowed * float(np.max(np.abs(table)))

    def sampled(self, held: Fingerprint, shared: Shared, rank: int) -> list[float]:
        """The elements that were kept of one parameter; NaN where it was None.

        None are where ranks kept different ones, as those do that hold other parameters beside it.
        """
        kept = {self.tracks[r].parameters[i].samples for r, i in shared.index.items()}
        if len(kept) > 1:
            return []
        return [float(x) for x in held.samples[self.samples_at(shared, rank)]]

    def samples_at(self, shared: Shared, rank: int) -> slice:
        """Where the sampled elements of a parameter lie among all that a rank has sampled."""
        start, end = self._offsets[rank][shared.index[rank] : shared.index[rank] + 2]
        return slice(start, end)

    @cached_property
    def returns_to_agreement(self) -> bool:
        """Do replicas that had drifted apart agree again later (local SGD, DiLoCo)?

        All at once, or each parameter by itself: a model may be averaged piece by piece, in turn.
        """
        if self._drifts_from_equal_gradients:
            return False  # rounds are of ranks that step with gradients of their own
        if self.meets_again:
            return True
        apart: set[str] = set()
        met: set[str] = set()
        first = 0
        for number in self.numbers:
            for kind in ("entry", "exit"):
                differ = set(names_of(self.differences(kind, number)))
                if apart and not differ:
                    return True
                first = first if apart else number
                met |= apart & self._same_to_the_bit(kind, number)
                apart |= differ
        return bool(apart) and all(
            shared.name in met or self._meet_after(shared, first)
            for shared in self.parameters
            if shared.name in apart
        )

    @cached_property
    def _drifts_from_equal_gradients(self) -> bool:
        """Do equal replicas first come apart in a step in which all used the same gradients?"""
        if self.counts_differ:
            return False
        names = {shared.name for shared in self.parameters}
        for number in self.numbers:
            if self.differences("entry", number):
                return False
            if self.differences("exit", number):
                return self._same_to_the_bit("gradients", number) >= names
        return False

    def _same_to_the_bit(self, kind: Kind, number: int) -> set[str]:
        """Names of parameters whose bits are equal on all ranks.

        Not of those whose values are close: small weights come near one another by chance.
        """
        same: set[str] = set()
        other: set[str] = set()
        for prints, shared, held, _ in self._held(kind, number):
            hashes = {int(prints[rank].hashes[shared.index[rank]]) for rank in held}
            (same if len(hashes) == 1 < len(held) else other).add(shared.name)
        return same - other

    def _meet_after(self, shared: Shared, step: int) -> bool:
        """Is a parameter the same on all ranks where the probe has looked between the steps?

        Ranks may take different numbers of steps in a round: the k-th meetings are the same one.
        """
        for met in zip(*(self.tracks[rank].meetings for rank in self.ranks), strict=False):
            hashes = dict(zip(self.ranks, met, strict=True))
            if min(number for number, *_ in met) > step and all(
                len({hashes[rank][1 + shared.index[rank]] for rank in group}) == 1
                for group in shared.groups
            ):
                return True
        return False

    @property
    def made_as(self) -> str:
        """The same for optimizers of the same parameters that one line makes, as once a round."""
        first = self.tracks[self.ranks[0]]
        held = [(p.name, p.shape) for p in first.parameters]
        return repr([self.ranks, [p.index for p in self.parameters], held, first.where])

    def gradient_table(self, name: str) -> list[dict[str, Any]]:
        """The first element of that gradient on every rank, step by step."""
        shared = next(p for p in self.parameters if p.name == name)
        rows = []
        for number in self.numbers[:TABLE_ROWS]:
            values = {}
            for rank, step in self.steps(number).items():
                if step.gradients is None or rank not in shared.index:
                    continue
                samples = self.sampled(step.gradients, shared, rank)
                if samples:
                    values[str(rank)] = samples[0]
            rows.append({"step": number + 1, "parameter": name, "values": values})
        return rows

    def drift_table(self) -> list[dict[str, float]]:
        """How far replicas were apart after each step."""
        return [{"step": step, "drift": drift} for step, drift in self.drift()[:TABLE_ROWS]]

    def drift(self) -> list[tuple[int, float]]:
        """(step, largest difference between replicas after it), over the sampled elements."""
        found = []
        for number in self.numbers:
            values = [d.largest for d in self.differences("exit", number)]
            measured = [value for value in values if not math.isnan(value)]
            if measured or not values:
                found.append((number + 1, max(measured, default=0.0)))
        return found
