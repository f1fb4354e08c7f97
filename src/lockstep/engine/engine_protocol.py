# SPDX-License-Identifier: Apache-2.0
"""`Engine`: the protocol through which a driver starts, calls and ends its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from lockstep.checkpoint import WrittenPart
    from lockstep.operator import TrainingOperator
    from lockstep.worker import (
        CheckpointOnDisk,
        ProgressReport,
        RemoteCall,
        Snapshot,
        StartReport,
        Worker,
    )

R = TypeVar("R")


@dataclass(frozen=True)
class Resources:
    """The resources of one worker in a cluster, and how the ranks communicate.

    Attributes:
        custom_resources: Ray resources besides CPU and GPU, by name.
        timeout_s: timeout of every collective, in seconds.
    """

    num_cpus: float
    custom_resources: Mapping[str, float] | None
    backend: str
    timeout_s: float


@dataclass(frozen=True)
class PoolStatus:
    """Counts of a trainer's workers, and the recoveries of its run.

    Attributes:
        workers: how many workers train.
        spares: how many spares are ready to replace a lost worker.
        generation: formations of the group so far, from 0.
        recoveries: one dict for each failure that the run recovered from, the first one first.
    """

    workers: int
    spares: int = 0
    generation: int = 0
    recoveries: Sequence[Mapping[str, Any]] = ()


class CallListener(Protocol):
    """Receives the progress of a running call, in the driver."""

    @property
    def rows_known(self) -> int:
        """The latest step of the run whose rows of metrics the listener has received."""

    def on_attempt(self, workers: int, recoveries: int) -> None:
        """The call begins, or begins again after a recovery; see `PoolStatus`."""

    def on_progress(self, report: ProgressReport) -> None:
        """Several times a second: the progress of rank 0, and all workers' rows after `rows_known`
        if callbacks ask for metrics of single steps."""


class SnapshotKeeper(Protocol):
    """Receives the copies that workers make of the run's state, in the driver's calling thread."""

    def keep(self, snapshot: Snapshot) -> None:
        """Receive a copy; an exception raised here ends the running call."""

    latest_step: int
    """The step of the latest copy that came, or of a state that was loaded since; 0 before both."""

    def note_failure(self, error: Exception) -> None:
        """Note that a worker made a copy which could not be sent to the driver."""

    @property
    def written(self) -> Sequence[CheckpointOnDisk]:
        """The latest checkpoints of this run on the disk, in the order of their writing."""

    def keep_written(self) -> AbstractContextManager[None]:
        """Inside, no checkpoint is written or removed. Waits for one that is being written."""

    def finish_writing(self, within_s: float) -> None:
        """Wait until the copies that were received are written, for `within_s` seconds at most."""


class SnapshotFetcher(Protocol):
    """Fetches copies of the run's state to the driver."""

    def request(self) -> None:
        """Request a copy before the next batch. Only sets a flag: signal handlers may call it."""

    def finish(self, timeout_s: float | None = None) -> None:
        """After a call, fetch the copy that is still on its way.

        Args:
            timeout_s: how long to wait for a worker that may not answer any more.
        """

    def drop(self) -> None:
        """Drop the copy that is still on its way, of steps that the run has left."""


class Engine(Protocol):
    """Starts workers, calls their remote methods, ends the workers.

    A user's exception in a worker arrives as itself, with its rank and the worker's traceback as a
    note. Workers whose call was interrupted (the call failed on one of them, or Ctrl-C came in the
    driver) live on, and `undo_interrupted_call` makes them ready for the next call. An engine whose
    workers cannot go on has ended all of them by the time it raises, and keeps the cause in
    `ended_by`.
    """

    @property
    def interrupted_by(self) -> BaseException | None:
        """The error that interrupted the latest call; None after `undo_interrupted_call`."""

    def undo_interrupted_call(self) -> None:
        """Take all workers back to the last committed step.

        Blocks until each worker has left its current computation. If a worker cannot go back, the
        workers are ended, and `ended_by` holds the cause.
        """

    @property
    def ended_by(self) -> BaseException | None:
        """The error that ended the workers; None while they live."""

    @property
    def start_reports(self) -> list[StartReport]:
        """The result of each worker's `start`, by rank."""

    def call(
        self,
        call: RemoteCall[Worker, R],
        *,
        listener: CallListener | None = None,
        retries: int = 3,
    ) -> list[R]:
        """Perform `call` on every worker, concurrently; results by rank.

        Args:
            listener: receives the progress of the call.
            retries: failures of the group from which an engine that recovers may recover.
        """

    def call_rank(self, rank: int, call: RemoteCall[Worker, R]) -> R:
        """Perform `call` on one worker."""

    def start_snapshot_fetcher(self, to: SnapshotKeeper) -> SnapshotFetcher:
        """Deliver the copies of the state that workers make from now on to `to`."""

    def write_parts(self, step: int, folder: str) -> list[WrittenPart] | None:
        """Let each worker write its copy of the state at `step`; see `CheckpointPart`.

        Another thread may call this while a call runs.

        Returns:
            What each rank wrote; None if a rank has no copy of that step any more.

        Raises:
            CheckpointWriteError: a worker died meanwhile.
        """

    def end_stopped_workers(self) -> None:
        """Call several times a second while the driver waits for workers outside of a call: end
        those that have been stopped, or whose machines have not answered, for too long."""

    def local_operator(self) -> TrainingOperator | None:
        """The operator of rank 0, if rank 0 lives in this process."""

    def set_num_shards(self, num_shards: int) -> None:
        """Note that a loaded state cuts global batches into `num_shards` shards from now on."""

    def status(self) -> PoolStatus:
        """The numbers of workers and spares, and the recoveries so far."""

    def end(self, cause: BaseException) -> None:
        """End all workers because of `cause`, which `ended_by` holds from then on."""

    def close(self, *, force: bool) -> None:
        """End all workers and release their resources; `force` does not ask them first."""
