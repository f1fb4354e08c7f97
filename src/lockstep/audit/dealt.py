# SPDX-License-Identifier: Apache-2.0
"""Whether the samples of one dataset were dealt out to the ranks, whoever dealt them."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.audit.facts import Loading

_LEAST: Final = 4
"""Samples of each rank, and batches where samples have no numbers."""


def is_dealt_out(loadings: Mapping[int, Sequence[Loading]]) -> bool:
    """Does each rank train on a part of its own?

    A sampler says so, or what was read does: nothing that a rank trains on was read by another one.
    The folds of a cross-validation overlap, or what one trains on is what another is judged by.

    Args:
        loadings: by rank.
    """
    each = (loading for of_rank in loadings.values() for loading in of_rank)
    if any(x.replicas is not None or "Distributed" in x.sampler for x in each):
        return True
    trained = {rank: _read(x, training=True) for rank, x in loadings.items()}
    judged = {rank: _read(x, training=False) for rank, x in loadings.items()}
    if len(trained) < 2 or min(map(len, trained.values())) < _LEAST:
        return False
    return all(
        trained[one].isdisjoint(trained[other])
        and trained[one].isdisjoint(judged[other])
        and trained[other].isdisjoint(judged[one])
        for one, other in combinations(trained, 2)
    )


def _read(loadings: Sequence[Loading], *, training: bool) -> set[Any]:
    """What stands for the samples: all of the first pass, if all of them can be told apart."""
    first = next((each for each in loadings if each.training == training), None)
    if first is None:
        return set()
    if not first.indices:
        return set(first.batches)  # a stream has no numbers
    rows = list(zip(*first.rows, strict=False))
    if first.samples or len(rows) < len(first.indices):
        return set(first.samples or first.indices)
    return set(rows)
