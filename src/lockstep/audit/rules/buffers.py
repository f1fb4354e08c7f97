# SPDX-License-Identifier: Apache-2.0
"""Buffers, such as BatchNorm's statistics, with which ranks evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.audit.rules.base import Code, named

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.audit.facts import Evaluation
    from lockstep.audit.finding import Finding
    from lockstep.audit.world import World

EVALUATED = Code("LS309", "ranks evaluate with different buffers")


class Buffers:
    """Only at an evaluation: between forwards they differ in every healthy run."""

    codes = (EVALUATED,)

    def judge(self, world: World) -> Iterable[Finding]:
        ledgers = world.ledgers
        if len(ledgers) < 2 or world.alone:
            return
        for at_once in _of_all_ranks([led.evaluations for led in ledgers.values()]):
            first = at_once[0]
            at_home = {name.rpartition(".")[0] for t in world.tracks for name in t.at_home}
            different = [
                index
                for index in _different(at_once)
                if first.names[index].rpartition(".")[0] not in at_home
            ]
            if different:
                names = [first.names[i] for i in different]
                yield EVALUATED.finding(
                    f"after step {first.step} the ranks evaluated {first.module} with "
                    f"different {named(names)}: each has another model",
                    "evaluate through the wrapper (it broadcasts rank 0's buffers), use "
                    "SyncBatchNorm, or evaluate on one rank",
                    rank=sorted(ledgers),
                    optimizer="*",
                    step=first.step or None,
                    parameters=names,
                    evidence={
                        "norms": {
                            str(r): float(e.buffers.norms[different[0]])
                            for r, e in zip(ledgers, at_once, strict=True)
                        }
                    },
                    where=first.where,
                )
                return


def _of_all_ranks(evaluations: list[list[Evaluation]]) -> list[tuple[Evaluation, ...]]:
    """The first after a step with the first on all ranks, the second with the second."""
    by_rank: list[dict[tuple[object, ...], Evaluation]] = []
    for of_rank in evaluations:
        found: dict[tuple[object, ...], Evaluation] = {}
        for one in of_rank:
            place = sum(known[0] == one.step for known in found)
            found[one.step, place, tuple(one.names)] = one
        by_rank.append(found)
    shared = [known for known in by_rank[0] if all(known in found for found in by_rank)]
    return [tuple(found[known] for found in by_rank) for known in shared]


def _different(at_once: Sequence[Evaluation]) -> list[int]:
    """Buffers that are not the same on all ranks, by more than rounding.

    By their elements too: two masks that keep as much of a layer have the same norm.
    """
    norms = np.array([e.buffers.norms for e in at_once])
    apart = _spread(norms) > 1e-6 * np.abs(norms).max(axis=0)
    samples = np.array([e.buffers.samples for e in at_once])
    place = 0
    for index, count in enumerate(at_once[0].counts):
        held = samples[:, place : place + count]
        place += count
        if count and _spread(held).max() > 1e-5 * np.abs(held).max():
            apart[index] = True
    return [int(index) for index in np.flatnonzero(apart)]


def _spread(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    difference: np.ndarray[Any, Any] = values.max(axis=0) - values.min(axis=0)
    return difference
