# SPDX-License-Identifier: Apache-2.0
"""Checks, before the first step, that all ranks read the data by the same plan.

Each rank builds its own loader in its own process. A dataset that lists its files in another order,
a sampler that is seeded from the clock, a batch size that depends on the rank, or a stream that
already reads only this rank's part: with any of them samples would be lost or read twice, and no
gradient would show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lockstep.data.batch_structure import content_digest
from lockstep.errors import DataOrderError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.data.global_batches import GlobalBatches
    from lockstep.data.shard_placement import ShardPlacement

_MEANING: Final = {
    "kind": ("kinds of loaders", "setup builds another loader on some ranks"),
    "length": ("lengths of the data", "the ranks see different files, or split them themselves"),
    "global_batch": (
        "global batch sizes",
        "batch_size depends on the rank; note that config[BATCH_SIZE] keeps the whole through "
        "* and // only",
    ),
    "drop_last": ("settings of drop_last", "setup builds another loader on some ranks"),
    "num_shards": ("numbers of shards", "the ranks were started with different arguments"),
    "seed": ("seeds", "the ranks were started with different arguments"),
    "epoch": ("epochs", "some ranks iterated the loader more often than others"),
    "first_batch": (
        "first global batches",
        "a sampler or stream that is seeded per process, depends on the rank, or lists files "
        "in no fixed order",
    ),
}


def plan_fingerprint(
    batches: GlobalBatches, placement: ShardPlacement, epoch: int
) -> dict[str, Any]:
    """The plan of an epoch as plain JSON, equal on ranks that read by the same plan."""
    return {
        "kind": batches.kind.value,
        "length": batches.length,
        "global_batch": batches.per_step,
        "drop_last": batches.drop_last,
        "num_shards": placement.num_shards,
        "seed": placement.seed,
        "epoch": epoch,
        "first_batch": _first_batch(batches, placement.seed, epoch),
    }


def _first_batch(batches: GlobalBatches, seed: int, epoch: int) -> str | None:
    first = next(batches.of_epoch(seed, epoch), None)
    if first is None:
        return None
    # One sample tells a stream apart from another rank's part of it, and spares the reading.
    return content_digest(first.items(0, 1 if batches.kind.is_data else len(first)))


def check_agreement(fingerprints: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to go on unless all ranks read by the same plan.

    Args:
        fingerprints: one per rank, in rank order, from ``fingerprint(epoch)``.

    Raises:
        DataOrderError: naming the first thing that differs, and on which ranks.
    """
    first = fingerprints[0]
    for key, (words, cause) in _MEANING.items():
        values = [fingerprint.get(key) for fingerprint in fingerprints]
        odd = [rank for rank, value in enumerate(values) if value != first.get(key)]
        if odd:
            raise DataOrderError(
                f"the ranks read their data by different {words}",
                where=f"rank(s) {', '.join(map(str, odd))} against rank 0",
                expected=f"{key} {first.get(key)} on every rank",
                got=", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values)),
                cause=cause,
                fix="build the same loader over the same data on every rank; lockstep gives "
                "each its part",
            )
