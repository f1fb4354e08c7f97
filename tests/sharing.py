# SPDX-License-Identifier: Apache-2.0
"""All the workers of a run, one after the other in this process: who was given what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.data import BatchParts, ShardAssignment, ShardedLoader, Step, shards_of


def shard_assignments(num_shards: int, num_workers: int, seed: int = 0) -> list[ShardAssignment]:
    """Contiguous shards for every worker; workers beyond the shards carry none."""
    return [
        ShardAssignment(num_shards, shards_of(worker, num_workers, num_shards), seed)
        for worker in range(num_workers)
    ]


def share_out(
    make_loader: Callable[[], Any],
    num_shards: int,
    num_workers: int,
    *,
    epoch: int = 0,
    start_step: int = 0,
    joint: bool = False,
    borrow: bool = False,
    seed: int = 0,
) -> list[list[Step]]:
    """The steps of every worker, each with a loader that it made itself."""
    joined = BatchParts.JOINT_OR_BORROWED if borrow else BatchParts.JOINT
    parts = joined if joint else BatchParts.BY_SHARD
    return [
        list(ShardedLoader(make_loader(), assignment, parts=parts).batches(epoch, start_step))
        for assignment in shard_assignments(num_shards, num_workers, seed)
    ]


def by_shard(workers: list[list[Step]]) -> dict[tuple[int, int], Any]:
    """The batches of all workers by (step, shard), as nested lists."""
    return {
        (step.index, part.shards[0]): plain(part.batch)
        for steps in workers
        for step in steps
        for part in step.parts
    }


def plain(batch: Any) -> Any:
    """A batch of tensors as nested lists, to be compared with ==."""
    if hasattr(batch, "tolist"):
        return batch.tolist()
    if isinstance(batch, (list, tuple)):
        return [plain(child) for child in batch]
    return batch


def samples(workers: list[list[Step]]) -> list[Any]:
    """Every sample that was given to anyone as its own, in no particular order."""
    return [
        sample
        for steps in workers
        for step in steps
        for part in step.parts
        if part.num_samples
        for sample in plain(part.batch)
    ]
