# SPDX-License-Identifier: Apache-2.0
"""Loader workers that draw the same random numbers: seeded alike on all ranks, or from copies.

Each worker has told what its generators began with and what its first samples left. A warning says
that samples were drawn alike; where that could not be measured there is a notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.audit.rules.base import Code

if TYPE_CHECKING:
    from lockstep.audit.facts import Loading, WorkerDraws
    from lockstep.audit.finding import Finding

SEEDS = Code("LS506", "the same random numbers in loader workers", "notice")


def equal_seeds(loadings: dict[int, Loading]) -> Finding | None:
    """What one iteration over a loader on every rank tells."""
    with_workers = {r: x for r, x in loadings.items() if x.worker_seed is not None}
    if len(with_workers) < 2:
        return None
    first = with_workers[min(with_workers)]
    if len({x.worker_seed for x in with_workers.values()}) > 1:
        return _by_function(with_workers)
    if _differ_by_function(with_workers):
        return None
    drawn, otherwise = _drawn(_side_by_side(with_workers), by_hand=False)
    measured = drawn and not otherwise and first.indices and _trains_on_different(with_workers)
    seeds_itself = any(worker is not None and worker.changed for worker in first.drawn)
    how = (
        f", and reading their first samples drew from {' and '.join(sorted(drawn))} the same way"
        if measured
        else ""
    )
    return SEEDS.finding(
        f"the loader workers of {first.key} have the same seeds on ranks {sorted(with_workers)}"
        f"{how}: random augmentation repeats from rank to rank",
        "DataLoader(..., generator=torch.Generator().manual_seed(seed + rank))"
        + ("" if measured else ", if the dataset draws random numbers"),
        severity="warning" if measured else None,
        rank=sorted(with_workers),
        evidence={"base_seed": first.worker_seed, "generators": sorted(drawn)},
        where=[*(first.seeded_at if seeds_itself else ()), *first.where],
    )


def copied_generators(loadings: dict[int, Loading]) -> Finding | None:
    """Each worker draws from a copy of its own of a generator that the dataset holds.

    A stream's workers may draw one order, of which each takes its part.
    """
    first = loadings[min(loadings)]
    if not first.indices or not any(x.training for x in loadings.values()):
        return None
    for rank, loading in loadings.items():
        held = [tuple(worker.held) for worker in loading.drawn if worker is not None]
        if len(held) < 2 or len(set(held)) > 1 or len(held[0]) < 2 or len(set(held[0])) < 2:
            continue  # they differ, or nothing was drawn
        return SEEDS.finding(
            f"the {len(held)} workers of {first.key} have each a copy of a generator that the "
            "dataset holds, and drew the same numbers from it for their first samples: random "
            "augmentation repeats from worker to worker, and in each epoch that starts new workers",
            "draw from numpy's or torch's own generators, which the loader seeds for each worker; "
            "or make the generator in `worker_init_fn` from `torch.initial_seed()`",
            severity="warning",
            rank=[rank],
            evidence={"workers": len(held)},
            where=first.where,
        )
    return None


def _side_by_side(loadings: dict[int, Loading]) -> list[list[WorkerDraws]]:
    """The k-th worker on every rank, of those that have begun everywhere."""
    together = zip(*(x.drawn for x in loadings.values()), strict=False)
    begun = ([worker for worker in workers if worker is not None] for workers in together)
    return [workers for workers in begun if len(workers) == len(loadings)]


def _differ_by_function(loadings: dict[int, Loading]) -> bool:
    """Has the program's function seeded all that the loader had seeded alike?"""
    workers = _side_by_side(loadings)
    return bool(workers) and all(
        len({seen.began[kind] for seen in at_once}) == len(at_once)
        for at_once in workers
        for kind in at_once[0].began
    )


def _by_function(loadings: dict[int, Loading]) -> Finding | None:
    first = loadings[min(loadings)]
    drawn, differs = _drawn(_side_by_side(loadings), by_hand=True)
    if not drawn or not _trains_on_different(loadings):
        return None
    names = " and ".join(sorted(drawn))
    return SEEDS.finding(
        f"`worker_init_fn` left the generators of {names} in the same state on ranks "
        f"{sorted(loadings)}, worker by worker, and reading the first samples of {first.key} drew "
        "from them the same way: random augmentation repeats from rank to rank",
        "seed with `torch.initial_seed()`, which differs by rank and worker, or add the rank",
        # A stream may draw the order in which the ranks share it out.
        severity="warning" if first.indices and not differs else None,
        rank=sorted(loadings),
        evidence={"generators": sorted(drawn), "workers": len(first.drawn)},
        where=[*first.seeded_at, *first.where],
    )


def _trains_on_different(loadings: dict[int, Loading]) -> bool:
    """What is evaluated may be seeded alike on purpose: its numbers are those of any run, then."""
    read = {
        (*x.indices[:256], *(x.batches[:8] if not x.indices else ())) for x in loadings.values()
    }
    return len(read) == len(loadings) and any(x.training for x in loadings.values())


def _drawn(workers: list[list[WorkerDraws]], *, by_hand: bool) -> tuple[set[str], bool]:
    """The generators that were seeded and drawn from alike; was one drawn from in another way?

    Args:
        workers: the k-th of every rank, side by side.
        by_hand: those alone that the program's own function seeded.
    """
    alike: set[str] = set()
    otherwise: set[str] = set()
    for at_once in workers:
        if not all(seen.after for seen in at_once):
            continue
        for kind in at_once[0].began:
            began = {seen.began[kind] for seen in at_once}
            after = {seen.after[kind] for seen in at_once}
            is_drawn = any(seen.began[kind] != seen.after[kind] for seen in at_once)
            counts = not by_hand or all(kind in seen.changed for seen in at_once)
            if is_drawn:
                same = counts and len(began) == 1 and len(after) == 1
                (alike if same else otherwise).add(kind)
    return alike - otherwise, bool(otherwise)
