# SPDX-License-Identifier: Apache-2.0
"""Remote methods that read a worker's position in its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.worker.remote_method import Communication, OnFailure, remote_method
from lockstep.worker.survivor_state import RunPosition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.worker.worker import Worker


class RunCounts(NamedTuple):
    """Passes over the training data begun and finished, and the steps of the run."""

    epochs_begun: int
    epochs_finished: int
    steps: int


@remote_method(Communication.NONE, OnFailure.REPEAT, is_timed=True)
def run_counts(worker: Worker) -> RunCounts:
    """How far the run has come."""
    steps = worker.operator._lockstep.committed
    return RunCounts(worker.epochs_entered, worker.epochs_finished, steps)


def run_position(worker: Worker) -> RunPosition:
    """How far the worker's state has come."""
    cursor = worker.cursors.get("train")
    epoch = worker.epochs_finished if cursor is None else cursor.epoch
    return RunPosition(worker.operator._lockstep.committed, epoch)


@remote_method(Communication.NONE, OnFailure.REPEAT)
def items_ahead(worker: Worker, purpose: str, shards: Sequence[int]) -> list[Any]:
    """The items that the next step reads for `shards`: indices into the dataset, if it has any."""
    return worker.cursors[purpose].items_ahead(list(shards))


@remote_method(Communication.NONE, OnFailure.REPEAT)
def steps_per_epoch(worker: Worker, purpose: str) -> int | None:
    """The global batches of an epoch that begins now; None where the data has no length."""
    return worker.cursors[purpose].source.steps_per_epoch


@remote_method(Communication.NONE, OnFailure.REPEAT)
def samples_of(
    worker: Worker, purpose: str, segments: Sequence[tuple[range, int, int]]
) -> int | None:
    """The number of samples that shards held in steps; None where the loader does not know.

    Args:
        segments: (shards, first step, number of steps); steps go on into the next epoch.
    """
    source = worker.cursors[purpose].source
    counts = [source.samples_of(*segment) for segment in segments]
    return None if None in counts else sum(count or 0 for count in counts)
