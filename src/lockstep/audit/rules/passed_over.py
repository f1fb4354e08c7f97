# SPDX-License-Identifier: Apache-2.0
"""Samples that no rank trains on, because the data was cut up by rank twice."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

from lockstep.audit.rules.base import Code
from lockstep.audit.rules.overlap import shares_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.facts import Loading
    from lockstep.audit.finding import Finding
    from lockstep.audit.world import World

PASSED_OVER = Code("LS509", "samples that no rank trains on", "warning")

_LEAST_BATCHES: Final = 2
_LEAST_ROWS: Final = 8
_SURE: Final = 2
"""Batches that are the same in two passes: the stream is not changed at random."""
_FIX = (
    "cut the data up once: give every rank the whole dataset and a DistributedSampler, or its own "
    "part and no sampler that shares it out; `lockstep.shard_loader(loader)` does it for any loader"
)


def passed_over(world: World, loadings: dict[int, Loading]) -> Finding | None:
    """One iteration on each rank: did each leave out a part of what only it was given?"""
    if not all(x.training for x in loadings.values()):
        return None
    return _by_the_sampler(loadings) or _in_turn(world, loadings)


def _by_the_sampler(loadings: dict[int, Loading]) -> Finding | None:
    """A sampler that shares out one dataset, in its order, where each rank has another.

    In a new order in every epoch it comes to all samples in the end. Where one list of names is the
    same on two ranks nothing is said.
    """
    first = loadings[min(loadings)]
    if first.shuffles is not False or not shares_out(loadings):
        return None
    columns = list(zip(*(x.contents for x in loadings.values()), strict=False))
    if not columns or any(len(set(column)) < len(loadings) for column in columns):
        return None
    return PASSED_OVER.finding(
        f"{first.sampler} shares {first.key} out as if all ranks had the same {first.size} "
        "samples, but each rank holds others, or in another order: each trains on one in "
        f"{first.replicas} of its own, and what it leaves out is not what another rank takes",
        _FIX,
        rank=sorted(loadings),
        evidence={"size": first.size, "replicas": first.replicas, "sampler": first.sampler},
        where=first.where,
    )


def _in_turn(world: World, loadings: dict[int, Loading]) -> Finding | None:
    """Every second batch for every second rank, where their streams are not the same one.

    A stream of samples that are changed at random is another one on each rank, and in each pass.
    """
    first = loadings[min(loadings)]
    used = {rank: {at for at in x.used if at < len(x.batches)} for rank, x in loadings.items()}
    if any(x.indices for x in loadings.values()) or min(map(len, used.values())) < _LEAST_BATCHES:
        return None
    if any(not used[one].isdisjoint(used[other]) for one, other in combinations(used, 2)):
        return None
    if not all(_is_read_again(world.ledgers[rank].loadings, x) for rank, x in loadings.items()):
        return None
    end = 1 + max(set().union(*used.values()))
    if len(set().union(*used.values())) < end or _are_one_stream(loadings):
        return None
    trained = {loadings[rank].batches[at] for rank, places in used.items() for at in places}
    left = {
        batch
        for rank, x in loadings.items()
        for at, batch in enumerate(x.batches[:end])
        if at not in used[rank]
    }
    if not left or not trained.isdisjoint(left):
        return None
    return PASSED_OVER.finding(
        f"each of ranks {sorted(loadings)} trains on some of the batches of {first.key} and leaves "
        f"the others out, as if another rank had the same ones: no rank trained on {len(left)} of "
        f"the first {len(left) + len(trained)} batches",
        _FIX,
        rank=sorted(loadings),
        evidence={"left_out": len(left), "trained": len(trained), "sampler": first.sampler},
        where=first.where,
    )


def _is_read_again(of_rank: Sequence[Loading], loading: Loading) -> bool:
    """Did another pass over the same loader begin with the same batches?"""
    return any(
        x is not loading and x.key == loading.key and x.batches[:_SURE] == loading.batches[:_SURE]
        for x in of_rank
    )


def _are_one_stream(loadings: dict[int, Loading]) -> bool:
    """Do all ranks read one stream, and change its samples each in its way?

    Then some tensor of a batch, that of the labels, is the same at the same places. Also True where
    too little is known.
    """
    columns = list(zip(*(x.rows for x in loadings.values()), strict=False))
    if not columns or min(map(len, columns[0])) < _LEAST_ROWS:
        return True
    least = min(map(len, columns[0]))
    return any(len({tuple(rows[:least]) for rows in column}) == 1 for column in columns)
