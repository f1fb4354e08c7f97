# SPDX-License-Identifier: Apache-2.0
"""Which samples the ranks read."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from lockstep.audit.rules.base import Code, Rule
from lockstep.audit.rules.overlap import (
    SAME,
    are_no_chance,
    same_rows_by_hand,
    same_samples,
    shares_out,
)
from lockstep.audit.rules.own_orders import own_orders
from lockstep.audit.rules.passed_over import PASSED_OVER, passed_over
from lockstep.audit.rules.worker_seeds import SEEDS, copied_generators, equal_seeds
from lockstep.audit.shared_track import side_by_side
from lockstep.audit.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Loading
    from lockstep.audit.finding import Finding

ORDER = Code("LS504", "the same order in every epoch", "warning")
EVALUATED = Code("LS505", "samples read more than once in evaluation", "warning")

_PADDING: Final = ("DistributedSampler", "BatchSamplerShard")
"""Torch's and Accelerate's: both give every rank as many samples, some of them twice."""


def _look(world: World) -> Iterable[Finding]:
    """Compares iterations over data loaders: the k-th of a loader on every rank."""
    reported: set[tuple[str, str]] = set()
    for loadings in _of_all_ranks(world):
        for found in (
            same_samples(world, loadings),
            passed_over(world, loadings),
            _twice(world, loadings),
            equal_seeds(loadings),
            copied_generators(loadings),
        ):
            key = loadings[min(loadings)].key
            if found is not None and (found.code, key) not in reported:
                reported.add((found.code, key))
                yield found
    by_hand = same_rows_by_hand(world) or own_orders(world)
    if by_hand is not None:
        yield by_hand
    for rank, ledger in world.ledgers.items():
        found = _order(rank, ledger.loadings)
        if found is not None:
            yield found
            break


DATA = Rule(
    (SAME, PASSED_OVER, ORDER, EVALUATED, SEEDS),
    _look,
    (World.is_model_parallel, World.trains_own_models),
)


def _of_all_ranks(world: World) -> list[dict[int, Loading]]:
    """The k-th iteration at a line, of those that train and of those that do not.

    Not the k-th of a loader: one rank may make more loaders, to evaluate alone.
    """
    found = side_by_side({rank: led.loadings for rank, led in world.ledgers.items()}, _site)
    return [_one_of_each_group(world, each) for each in found if len(each) > 1]


def _one_of_each_group(world: World, loadings: dict[int, Loading]) -> dict[int, Loading]:
    """Keep one rank of each process group whose ranks all read the same samples.

    They share the work on one batch: each takes a part of a sequence, or of a layer, beside a
    wrapper that averages over all ranks. Where all ranks read the same, no group explains it.
    """
    kept = dict(loadings)
    for group in world.subgroups:
        of_group = [loadings[rank] for rank in group if rank in loadings]
        if len(of_group) == len(group) and all(_read_alike(of_group[0], x) for x in of_group):
            kept = {rank: x for rank, x in kept.items() if rank not in group[1:]}
    return kept if len(kept) > 1 else loadings


def _read_alike(one: Loading, other: Loading) -> bool:
    """The same samples, or batches of a stream; a rank may have been given some ahead."""
    here, there = (x.indices or x.batches for x in (one, other))
    least = min(len(here), len(there))
    return least > 0 and here[:least] == there[:least]


def _site(loading: Loading) -> tuple[Any, ...]:
    at = [(place.file, place.line) for place in loading.where[:1]]
    return (loading.key.split("#")[0], *at, loading.training)


def _twice(world: World, loadings: dict[int, Loading]) -> Finding | None:
    """Padding of a DistributedSampler, where nothing is trained."""
    first = loadings[min(loadings)]
    if any(x.training or not x.indices for x in loadings.values()) or first.size is None:
        return None
    if not all(x.has_ended for x in loadings.values()):
        return None  # broken off: a batch size that is tried out, not an evaluation
    if not any(name in first.sampler for name in _PADDING) or not shares_out(loadings):
        return None
    if any(f.leaves_out_padding for f in world.facts):
        return None
    counts: Counter[int] = Counter()
    for loading in loadings.values():
        counts.update(loading.indices)
    again = sorted(index for index, count in counts.items() if count > 1)
    if not again or len(counts) < first.size:
        return None
    gathers = any("gather" in call.op for led in world.ledgers.values() for call in led.calls)
    return EVALUATED.finding(
        f"an evaluation over {first.key} read {len(again)} of {first.size} samples more than once "
        f"(indices {again[:5]}): {first.sampler} pads to the same length on every rank",
        "leave the repeated samples out of the result, or give each rank its exact part: "
        "`lockstep.shard_loader(loader)`",
        # Where results are gathered one by one, the program may have left them out. And it was not
        # the program that chose what pads where Lightning puts its sampler into every loader.
        severity="notice" if gathers or any(f.lightning for f in world.facts) else None,
        rank=sorted(loadings),
        evidence={"repeated": again[:20], "size": first.size, "read": sum(counts.values())},
        where=first.where,
    )


def _order(rank: int, loadings: list[Loading]) -> Finding | None:
    by_key: dict[Any, list[Loading]] = {}
    for loading in loadings:
        if loading.training and len(set(loading.indices)) > 3:
            # The same loader, or loaders that the same line reads.
            for known in {loading.key, _site(loading)}:
                by_key.setdefault(known, []).append(loading)
    for epochs in by_key.values():
        whole = [x for x in epochs if len(x.indices) == len(epochs[0].indices)]
        whole = [x for x in whole if _are_of_one_dataset(x, whole[-1])]
        if len({x.step for x in whole}) < max(len(whole), 2):
            continue  # side by side, and not one after the other
        whole = _in_one_order(whole)
        if not whole:
            continue
        first = whole[0]
        ascending = first.indices == sorted(first.indices)
        if ascending or first.shuffles is False or "Distributed" not in first.sampler:
            continue  # in the dataset's order: not shuffled, which can be meant
        return ORDER.finding(
            f"{len(whole)} epochs over {first.key} read the samples in the same shuffled order",
            "call `sampler.set_epoch(epoch)` before each epoch",
            rank=[rank],
            evidence={"epochs": len(whole), "sampler": first.sampler, "first": first.indices[:8]},
            where=first.where,
        )
    return None


def _are_of_one_dataset(one: Loading, other: Loading) -> bool:
    """Of one loader; or their datasets hold the same, or some tensor of batches is the same."""
    if one.key == other.key or (one.contents and one.contents == other.contents):
        return True
    if one.dataset is not None and (one.dataset, one.part) == (other.dataset, other.part):
        return True
    columns = [*zip(one.rows, other.rows, strict=False), (one.batches, other.batches)]
    for here, there in columns:
        least = min(len(here), len(there))
        if here[:least] == there[:least] and are_no_chance(here[:least]):
            return True
    return False


def _in_one_order(epochs: list[Loading]) -> list[Loading]:
    """All of them; or the last ones, if more than ever before have one order.

    As where a loader is made anew and the old one's sampler is told of the epochs. A loader that is
    read several times in each epoch has as many of one order again and again.
    """
    runs = [list(run) for _, run in itertools.groupby(epochs, key=lambda x: x.indices)]
    before = max((len(run) for run in runs[:-1]), default=1)
    return runs[-1] if len(runs[-1]) > before and len(runs[-1]) >= (len(runs) > 1) + 2 else []
