# SPDX-License-Identifier: Apache-2.0
"""Which samples the ranks read."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from lockstep.audit.rules.base import Code, Explained

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Loading
    from lockstep.audit.world import World

SAME = Code("LS503", "the same samples on several ranks")
ORDER = Code("LS504", "the same order in every epoch", "warning")
EVALUATED = Code("LS505", "samples read more than once in evaluation", "warning")
SEEDS = Code("LS506", "equal worker seeds on all ranks", "notice")

_LEAST_BATCHES = 2


class Data:
    """Compares iterations over data loaders: the k-th of a loader on every rank."""

    codes = (SAME, ORDER, EVALUATED, SEEDS)

    def judge(self, world: World, explained: Explained) -> Iterable[Finding]:
        if is_model_parallel(world):
            return
        reported: set[tuple[str, str]] = set()
        for loadings in _side_by_side(world):
            for found in (_same(world, loadings), _twice(loadings), _seeds(loadings)):
                known = (found.code, loadings[min(loadings)].key) if found else None
                if found is not None and known not in reported:
                    explained.same_samples |= found.code == SAME.code
                    reported.add(known)  # type: ignore[arg-type]
                    yield found
        for rank, ledger in world.ledgers.items():
            found = _order(rank, ledger.loadings)
            if found is not None:
                yield found
                break


def is_model_parallel(world: World) -> bool:
    """Ranks that share one sample's work read the same samples on purpose."""
    sharded = not any(world.fact("fsdp")) and any(
        p.sharded for led in world.ledgers.values() for t in led.tracks for p in t.parameters
    )
    smaller = any(
        ranks is not None and 1 < len(ranks) < world.size
        for groups in world.fact("subgroups")
        for ranks in groups
    )
    wrappers = any(
        p.wrapper for led in world.ledgers.values() for t in led.tracks for p in t.parameters
    )
    return (sharded or smaller or any(world.fact("all_to_all"))) and not wrappers


def _side_by_side(world: World) -> list[dict[int, Loading]]:
    found: dict[tuple[str, int], dict[int, Loading]] = {}
    for rank, ledger in world.ledgers.items():
        for loading in ledger.loadings:
            found.setdefault((loading.key, loading.epoch), {})[rank] = loading
    return [loadings for loadings in found.values() if len(loadings) > 1]


def _same(world: World, loadings: dict[int, Loading]) -> Finding | None:
    if not all(x.training for x in loadings.values()):
        return None
    return _same_batches(loadings) or _overlap(world, loadings)


def _same_batches(loadings: dict[int, Loading]) -> Finding | None:
    streams = [x.batches for x in loadings.values()]
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


def _overlap(world: World, loadings: dict[int, Loading]) -> Finding | None:
    first = loadings[min(loadings)]
    if any(not x.indices for x in loadings.values()) or first.size is None:
        return None
    readers: Counter[int] = Counter()
    for loading in loadings.values():
        readers.update(set(loading.indices))
    shared = [index for index, count in readers.items() if count > 1]
    read = sum(len(set(x.indices)) for x in loadings.values())
    # Padding makes every rank's part as long as the longest: less than one sample a rank.
    if len(shared) < len(loadings) or len(shared) <= 0.05 * len(readers):
        return None
    missed = first.size - len(readers)
    partial = any(len(set(x.indices)) < first.size for x in loadings.values())
    whole = read >= len(loadings) * first.size
    if not (whole or (partial and "Distributed" in first.sampler)):
        return None
    return SAME.finding(
        f"in one pass over {first.key} ({first.size} samples) {len(shared)} samples were read by "
        f"more than one of ranks {sorted(loadings)}, and {max(missed, 0)} by none",
        "one sampler for all ranks: DistributedSampler(dataset, seed=...) with the same seed, "
        "num_replicas and each rank's own number, or `lockstep.shard_loader(loader)`",
        severity="warning" if whole and "Distributed" not in first.sampler else "error",
        rank=sorted(loadings),
        evidence={
            "shared": len(shared),
            "missed": max(missed, 0),
            "size": first.size,
            "sampler": first.sampler,
        },
        where=first.where,
    )


def _twice(loadings: dict[int, Loading]) -> Finding | None:
    """Padding of a DistributedSampler, where nothing is trained."""
    first = loadings[min(loadings)]
    if any(x.training or not x.indices for x in loadings.values()) or first.size is None:
        return None
    if "DistributedSampler" not in first.sampler:
        return None
    counts: Counter[int] = Counter()
    for loading in loadings.values():
        counts.update(loading.indices)
    again = sorted(index for index, count in counts.items() if count > 1)
    if not again or len(counts) < first.size:
        return None
    return EVALUATED.finding(
        f"an evaluation over {first.key} read {len(again)} of {first.size} samples more than once "
        f"(indices {again[:5]}): {first.sampler} pads to the same length on every rank",
        "leave the repeated samples out of the result, or give each rank its exact part: "
        "`lockstep.shard_loader(loader)`",
        rank=sorted(loadings),
        evidence={"repeated": again[:20], "size": first.size, "read": sum(counts.values())},
        where=first.where,
    )


def _seeds(loadings: dict[int, Loading]) -> Finding | None:
    seeds = {rank: x.worker_seed for rank, x in loadings.items() if x.worker_seed is not None}
    if len(seeds) < 2 or len(set(seeds.values())) > 1:
        return None
    first = loadings[min(loadings)]
    return SEEDS.finding(
        f"the loader workers of {first.key} have the same seeds on ranks {sorted(seeds)}: random "
        "augmentation repeats from rank to rank",
        "DataLoader(..., generator=torch.Generator().manual_seed(seed + rank)), if the dataset "
        "draws random numbers",
        rank=sorted(seeds),
        evidence={"base_seed": next(iter(seeds.values()))},
        where=first.where,
    )


def _order(rank: int, loadings: list[Loading]) -> Finding | None:
    by_key: dict[str, list[Loading]] = {}
    for loading in loadings:
        if loading.training and len(set(loading.indices)) > 3:
            by_key.setdefault(loading.key, []).append(loading)
    for key, epochs in by_key.items():
        whole = [x for x in epochs if len(x.indices) == len(epochs[0].indices)]
        if len(whole) < 2 or any(x.indices != whole[0].indices for x in whole):
            continue
        first = whole[0]
        ascending = first.indices == sorted(first.indices)
        if ascending or "Distributed" not in first.sampler:
            continue  # in the dataset's order: not shuffled, which can be meant
        return ORDER.finding(
            f"{len(whole)} epochs over {key} read the samples in the same shuffled order",
            "call `sampler.set_epoch(epoch)` before each epoch",
            rank=[rank],
            evidence={"epochs": len(whole), "sampler": first.sampler, "first": first.indices[:8]},
            where=first.where,
        )
    return None
