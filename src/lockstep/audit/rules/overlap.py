# SPDX-License-Identifier: Apache-2.0
"""Which samples several ranks train on.

A batch that is the same on all ranks may be cut up by each of them, and an index is the same sample
on two ranks only where they have one dataset: both are looked at before anything is said.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lockstep.audit.facts import MOST_INDICES
from lockstep.audit.ledger import REDUCING
from lockstep.audit.rules.base import Code

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.audit.facts import Loading, Track
    from lockstep.audit.finding import Finding, Place
    from lockstep.audit.world import World

SAME = Code("LS503", "the same samples on several ranks")

_LEAST_BATCHES = 2
_LEAST_ROWS = 8
_STEPS = 3
_ALIKE = 0.2
"""Of so many samples, and more, that are read by two ranks."""
_IN_ORDER = 0.5
"""Correlation of the places at which two ranks were given the same samples."""
_NO_CHANCE = 8.0
"""Bits: rows that agree as unlikely as one of 256."""


def same_samples(world: World, loadings: dict[int, Loading]) -> Finding | None:
    """One iteration on each rank: did they train on the same samples?"""
    if not all(x.training for x in loadings.values()) or _is_cut(world, loadings):
        return None
    if _add_up_by_sample(world, loadings):
        return None
    found = _same_batches(loadings)
    if found is None and not _take_turns(loadings):
        found = (
            _overlap(loadings) or _same_rows_of_loaders(loadings) or _batches_elsewhere(loadings)
        )
    alone = world.size > 1 and {facts.accelerate for facts in world.facts} - {None} == {1}
    return found if found is None or not alone else _of_accelerate(world, found)


def same_rows_by_hand(world: World) -> Finding | None:
    """Of batches that no loader gave, in the first pass over the data.

    Rows that two ranks read at once may be what one needs to compute on the other's border: the
    halo of a part of a field or of a graph, which is in no loss. Ranks that meet in rounds may be
    dealt the samples anew in each: a client that another rank plays.
    """
    for track in world.compared:
        if track.returns_to_agreement:
            continue
        read = {rank: _read_by_hand(track.tracks[rank]) for rank in track.ranks}
        early = [track.steps(number).values() for number in track.numbers[:_STEPS]]
        differ = all(len({tuple(s.fed_rows) for s in steps}) > 1 for steps in early)
        if (
            early
            and differ
            and all(len({at for _, at in rows}) >= _STEPS for rows in read.values())
        ):
            readers = Counter(row for rows in read.values() for row in set(rows))
            held = {r: [row[0] for row in rows if readers[row] == 1] for r, rows in read.items()}
            found = _same_rows(held, "the program", next(iter(early[0])).where)
            if found is not None:
                return replace(found, optimizer=track.first.key_of_all)
    return None


def _read_by_hand(track: Track) -> list[tuple[int, int]]:
    """Each row and the step that read it."""
    rows: list[tuple[int, int]] = []
    known: set[int] = set()
    for step in track.steps:
        if not known.isdisjoint(step.fed_rows):
            break  # the next pass; or samples that are drawn, and by chance on two ranks as well
        known.update(step.fed_rows)
        rows += [(row, step.number) for row in step.fed_rows]
    return rows


def _of_accelerate(world: World, found: Finding) -> Finding:
    """Its loaders share out what its processes read, and it knows of one."""
    return replace(
        found,
        message=f"{found.message}. Accelerate counts one process here (`num_processes` is 1) and "
        f"not {world.size}, so that each prepares the whole data and the whole model for itself",
        fix="without GPUs `Accelerator(cpu=True)`, or `accelerate launch --cpu`, which sets "
        "ACCELERATE_USE_CPU: then Accelerate joins the ranks and shares the samples out",
    )


def _is_cut(world: World, loadings: dict[int, Loading]) -> bool:
    """Does each rank take its own slice of what all of them read?

    What the first module of a step was given then differs, and is at most a rank's share.
    """
    for track in world.tracks:
        # Later batches may be cut, or padded, to other lengths than the first.
        steps = track.steps(track.numbers[0]) if track.numbers else {}
        given = {rank: step.fed_shapes for rank, step in steps.items() if rank in loadings}
        shares = (
            _is_share(loadings[rank].shapes, parts, len(world.ledgers))
            for rank, parts in given.items()
        )
        if given and track.fed(track.numbers[0]) == "own" and all(shares):
            return True
    return False


def _add_up_by_sample(world: World, loadings: dict[int, Loading]) -> bool:
    """Do the ranks add up, before each step, numbers of which each sample of a batch has one?

    That makes sense of the same samples alone, of which each rank draws other answers or noise.
    """
    rows = {shape[0] for x in loadings.values() for shape in x.shapes[:1] if shape and shape[0] > 1}
    steps = [t.steps(n).values() for t in world.tracks for n in t.numbers[:_STEPS]]
    return bool(steps) and all(
        any(c.op in REDUCING and not c.parameter and rows & set(c.shape) for c in step.collectives)
        for of_ranks in steps
        for step in of_ranks
    )


def _is_share(wholes: list[list[int]], parts: list[list[int]], size: int) -> bool:
    """Is the largest tensor at most a rank's share, whatever its shape? Shares differ by a row."""
    part = max(parts, key=math.prod, default=[])
    row = math.prod(part) / max(part, default=1)
    return bool(part) and math.prod(part) < max(map(math.prod, wholes), default=0) / size + row


def _same_batches(loadings: dict[int, Loading]) -> Finding | None:
    streams = [[x.batches[place] for place in x.used] for x in loadings.values()]
    compared = min(map(len, streams))
    distinct = len(set(streams[0][:compared]))
    equal = sum(1 for at_once in zip(*streams, strict=False) if len(set(at_once)) == 1)
    if compared < _LEAST_BATCHES or distinct < _LEAST_BATCHES or equal < compared:
        return None
    first = loadings[min(loadings)]
    return SAME.finding(
        f"the first {compared} batches of {first.key} are the same on ranks {sorted(loadings)}: "
        f"{len(loadings)} ranks do the work of one",
        "give each rank its part: DataLoader(..., sampler=DistributedSampler(dataset)), for an "
        "IterableDataset skip what belongs to other ranks, or `lockstep.shard_loader(loader)`",
        rank=sorted(loadings),
        evidence={"batches": compared, "equal": equal, "sampler": first.sampler},
        where=first.where,
    )


def _take_turns(loadings: dict[int, Loading]) -> bool:
    """Are the batches that backward followed other ones on each rank?"""
    return any(
        len(set(places)) > 1 for places in zip(*(x.used for x in loadings.values()), strict=False)
    )


def _overlap(loadings: dict[int, Loading]) -> Finding | None:
    first = loadings[min(loadings)]
    if any(not x.indices for x in loadings.values()) or first.size is None:
        return None
    readers: Counter[int] = Counter()
    for loading in loadings.values():
        readers.update(set(_samples(loading)))
    shared = [index for index, count in readers.items() if count > 1]
    # Padding makes every rank's part as long as the longest: less than one sample a rank.
    if len(shared) < len(loadings) or len(shared) <= 0.05 * len(readers):
        return None
    pairs = math.comb(len(loadings), 2)
    if 4 * pairs * max(map(_drawn_again, loadings.values())) > len(shared):
        return None  # with replacement: then also any two ranks may draw the same sample
    parts = len({x.part for x in loadings.values()}) > 1
    most = min(first.size, MOST_INDICES)
    whole = not parts and all(len(set(x.indices)) >= most for x in loadings.values())
    shares = shares_out(loadings)
    # Only the first indices of a rank are known: of others nobody can say that no rank read them.
    is_counted = not parts and first.size <= MOST_INDICES
    missed = max(first.size - len(readers), 0) if is_counted else 0
    is_dealt = _is_dealt(loadings, missed)
    # An index is the same sample on two ranks only if they have one dataset.
    if not (_same_dataset(loadings) or (shares and not parts) or is_dealt):
        return None
    if not (whole or parts or "Distributed" in first.sampler or is_dealt):
        return None
    read = (
        "the ranks read different parts (`Subset`) of one dataset and "
        if parts
        else f"in one pass over {first.key} ({first.size} samples) "
    )
    said = (
        f"each of ranks {sorted(loadings)} read all samples: {len(loadings)} ranks do the work of "
        "one"
        if whole and is_counted
        else f"{len(shared)} samples were read by more than one of ranks {sorted(loadings)}"
        + (f", and {missed} by none" if is_counted else "")
    )
    return SAME.finding(
        f"{read}{said}",
        "one split for all ranks: random_split(..., generator=torch.Generator().manual_seed(0)), "
        "before a DistributedSampler shares it out"
        if parts
        else "one sampler for all ranks: DistributedSampler(dataset, seed=...) with the same seed, "
        "num_replicas and each rank's own number, or `lockstep.shard_loader(loader)`",
        severity="error" if "Distributed" in first.sampler else "warning",
        rank=sorted(loadings),
        evidence={
            "shared": len(shared),
            "missed": missed,
            "size": first.size,
            "sampler": first.sampler,
        },
        where=first.where,
    )


def _is_dealt(loadings: dict[int, Loading], missed: int) -> bool:
    """Does the program's own sampler give each rank its share of the dataset, no sample twice?

    As many samples then are missed as are read twice. Ranks that draw on their own draw again, and
    a rank that has a dataset to itself reads all of it.
    """
    first = loadings[min(loadings)]
    size, batch = first.size or 0, max(first.batch_sizes, default=1)
    read = [len(_samples(x)) for x in loadings.values()]
    if not all(x.has_ended for x in loadings.values()):
        return False
    whole = abs(sum(read) - size) <= batch * len(read) and max(read) - min(read) <= batch
    if not whole or missed <= 0.05 * size or _is_repeated(loadings):
        return False
    return not any(map(_drawn_again, loadings.values()))


def _is_repeated(loadings: dict[int, Loading]) -> bool:
    """Does each sample go to as many ranks, in turn, as where each of them augments it anew?

    All but some at the end, and no two ranks get the same ones. Chance does not deal so.
    """
    held = {frozenset(_samples(x)) for x in loadings.values()}
    readers = Counter(index for of_rank in held for index in of_rank)
    times, count = Counter(readers.values()).most_common(1)[0]
    return times > 1 and count >= len(readers) - len(loadings) and len(held) == len(loadings)


def _same_rows_of_loaders(loadings: dict[int, Loading]) -> Finding | None:
    """Datasets of each rank's own, in which the samples of others are found."""
    first = loadings[min(loadings)]
    held = {rank: list(zip(*x.rows, strict=False)) for rank, x in loadings.items()}
    found = _same_rows(held, first.key, first.where)
    if found is None or first.indices or _in_one_order([held[rank] for rank in found.rank]):
        return found
    return None  # ranks may read a stream each in its own order, and come to the same by chance


def _in_one_order(held: Sequence[Sequence[object]]) -> bool:
    """Did two ranks get what both were given in about the same order?"""
    here, there = ({row: place for place, row in enumerate(rows)} for rows in held)
    places = np.array([(here[row], there[row]) for row in here if row in there], dtype=float)
    return bool(np.corrcoef(places.T)[0, 1] > _IN_ORDER)


def _same_rows(
    held: Mapping[int, Sequence[object]], giver: str, where: list[Place]
) -> Finding | None:
    """Samples that two ranks were given.

    Only of samples that hardly ever are the same on one rank: then chance would not make them so.

    Args:
        held: by rank, what stands for each sample.
        giver: of the samples, for the message.
    """
    pair = _alike(held, _LEAST_ROWS)
    if pair is None or min(map(len, held.values())) < _LEAST_ROWS:
        return None
    return SAME.finding(
        f"of the first {pair.least} samples that {giver} gave to each of ranks {pair.ranks[0]} and "
        f"{pair.ranks[1]}, {pair.shared} hold the same on both: the ranks' parts of the data "
        "overlap",
        "one split for all ranks: shuffle with a seed that they share before each takes its "
        "part, or give all the whole dataset and a DistributedSampler",
        severity="warning",
        rank=pair.ranks,
        evidence={"shared": pair.shared, "compared": pair.least},
        where=where,
    )


class _Pair(NamedTuple):
    """Two ranks, one of which was given `least` things, and how many both were given."""

    ranks: list[int]
    shared: int
    least: int


def _alike(held: Mapping[int, Sequence[object]], least_shared: int) -> _Pair | None:
    """The first two ranks that were given so much alike that it is no chance."""
    again = max(len(given) - len(set(given)) for given in held.values())
    for (rank, given), (other, theirs) in combinations(held.items(), 2):
        pair = _Pair([rank, other], len(set(given) & set(theirs)), min(len(given), len(theirs)))
        # Of so few that are drawn with replacement none may be drawn again.
        if pair.shared >= max(least_shared, again * 4) and pair.shared > _ALIKE * pair.least:
            return pair
    return None


def _batches_elsewhere(loadings: dict[int, Loading]) -> Finding | None:
    """Whole batches that another rank trains on as well, at another time: parts that overlap."""
    held = {rank: [x.batches[place] for place in x.used] for rank, x in loadings.items()}
    pair = _alike(held, _LEAST_BATCHES)
    if pair is None:
        return None
    first = loadings[pair.ranks[0]]
    return SAME.finding(
        f"of the first {pair.least} batches that {first.key} gave to each of ranks "
        f"{pair.ranks[0]} and {pair.ranks[1]}, {pair.shared} are the same on both: the ranks' "
        "parts of the data overlap",
        "let each worker of each rank read a part of its own: part rank * num_workers + worker "
        "of world_size * num_workers, or `lockstep.shard_loader(loader)`",
        rank=pair.ranks,
        evidence={"shared": pair.shared, "compared": pair.least},
        where=first.where,
    )


def _drawn_again(loading: Loading) -> int:
    return len(_samples(loading)) - len(set(_samples(loading)))


def _samples(loading: Loading) -> list[int]:
    return loading.samples or loading.indices


def shares_out(loadings: dict[int, Loading]) -> bool:
    """Do the ranks' samplers say that they share one dataset out?"""
    replicas = {x.replicas for x in loadings.values()}
    sizes = {x.size for x in loadings.values()}
    return len(sizes) == 1 and all(n is not None and n > 1 for n in replicas)


def _same_dataset(loadings: dict[int, Loading]) -> bool:
    """Do the ranks' datasets hold the same? Or did equal indices bring equal rows, and so many
    different ones that it is no chance?

    All tensors of a batch count: files of a rank's own may have the same labels in the same order.
    Rows that are augmented differ, and tell nothing.
    """
    held = {x.dataset for x in loadings.values()}
    if len(held) == 1 and None not in held:
        return True
    first, *others = loadings.values()
    return all(_agree(first, other) for other in others)


def _agree(first: Loading, other: Loading) -> bool:
    here = dict(zip(_samples(first), zip(*first.rows, strict=False), strict=False))
    there = dict(zip(_samples(other), zip(*other.rows, strict=False), strict=False))
    common = [index for index in here if index in there]
    if not common or any(here[index] != there[index] for index in common):
        return False
    return are_no_chance([here[index] for index in common])


def are_no_chance(rows: Sequence[object]) -> bool:
    """Are there so many different ones among `rows` that others would hardly be the same?"""
    surprise = sum(-n * math.log2(n / len(rows)) for n in Counter(rows).values())
    return surprise >= _NO_CHANCE
