# SPDX-License-Identifier: Apache-2.0
"""Loader workers that draw the same random numbers on all ranks: seeded by the loader, or by hand.

Without a ``worker_init_fn`` the loader's seed decides, and that samples are drawn from is not
measured: a notice. With one, each worker has told what it began with and what its first samples
left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.audit.rules.base import Code

if TYPE_CHECKING:
    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Loading

SEEDS = Code("LS506", "equal worker seeds on all ranks", "notice")


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
    return SEEDS.finding(
        f"the loader workers of {first.key} have the same seeds on ranks {sorted(with_workers)}: "
        "random augmentation repeats from rank to rank",
        "DataLoader(..., generator=torch.Generator().manual_seed(seed + rank)), if the dataset "
        "draws random numbers",
        rank=sorted(with_workers),
        evidence={"base_seed": first.worker_seed},
        where=[*(first.seeded_at if any(map(_changes, first.drawn)) else ()), *first.where],
    )


def _changes(seen: dict[str, Any]) -> bool:
    return bool(seen.get("changed"))


def _side_by_side(loadings: dict[int, Loading]) -> list[list[dict[str, Any]]]:
    """The k-th worker on every rank, of those that have begun everywhere."""
    together = zip(*(x.drawn for x in loadings.values()), strict=False)
    return [list(workers) for workers in together if all("began" in seen for seen in workers)]


def _differ_by_function(loadings: dict[int, Loading]) -> bool:
    """Has the program's function seeded all that the loader had seeded alike?"""
    workers = _side_by_side(loadings)
    return bool(workers) and all(
        len({seen["began"][kind] for seen in at_once}) == len(at_once)
        for at_once in workers
        for kind in at_once[0]["began"]
    )


def _by_function(loadings: dict[int, Loading]) -> Finding | None:
    first = loadings[min(loadings)]
    # What is evaluated may be seeded alike on purpose, so that its numbers are those of any run.
    if not _read_different_samples(loadings) or not any(x.training for x in loadings.values()):
        return None
    drawn, differs = _drawn(_side_by_side(loadings))
    if not drawn:
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


def _read_different_samples(loadings: dict[int, Loading]) -> bool:
    read = {
        (*x.indices[:256], *(x.batches[:8] if not x.indices else ())) for x in loadings.values()
    }
    return len(read) == len(loadings)


def _drawn(workers: list[list[dict[str, Any]]]) -> tuple[set[str], bool]:
    """The generators that were seeded and drawn from alike; was one drawn from in another way?"""
    alike: set[str] = set()
    otherwise: set[str] = set()
    for at_once in workers:
        if not all("after" in seen for seen in at_once):
            continue
        for kind in at_once[0]["began"]:
            began = {seen["began"][kind] for seen in at_once}
            after = {seen["after"][kind] for seen in at_once}
            is_drawn = any(seen["began"][kind] != seen["after"][kind] for seen in at_once)
            by_hand = all(kind in seen["changed"] for seen in at_once)
            if is_drawn:
                same = by_hand and len(began) == 1 and len(after) == 1
                (alike if same else otherwise).add(kind)
    return alike - otherwise, bool(otherwise)
