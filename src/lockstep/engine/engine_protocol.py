# SPDX-License-Identifier: Apache-2.0
"""The engine: how a driver reaches its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lockstep.operator import TrainingOperator
    from lockstep.worker import ProgressReport, RemoteCall, Snapshot, StartReport, Worker

    OnProgress = Callable[[ProgressReport], int]
    """Called now and then with a running call's progress; returns the step of the run up to which
    rows of metrics are known to the caller, who is given all later ones the next time."""

R = TypeVar("R")


@dataclass(frozen=True)
class Resources:
    """What one worker asks of a cluster, and how the ranks reach each other.

    Attributes:
        further: Ray resources besides CPU and GPU, by name.
        timeout_s: bound of every collective, in seconds.
    """

    num_cpus: float
    num_gpus: float
    custom_resources: Mapping[str, float] | None
    backend: str
    timeout_s: float


@dataclass(frozen=True)
class PoolStatus:
    """The workers of a trainer, counted.

    Attributes:
        workers: how many train.
        spares: how many wait, ready, for the place of one that is lost.
        generation: formations of the group so far, from 0.
        recoveries: one dict for each failure that the run recovered from, the first one first.
    """

    workers: int
    spares: int = 0
    generation: int = 0
    recoveries: Sequence[Mapping[str, Any]] = ()


class SnapshotKeeper(Protocol):
    """Gets the copies that workers make of the run's state. Called in the driver's main flow."""

    def keep(self, snapshot: Snapshot) -> None:
        """A copy has come; what this raises ends the call."""

    def keep_failed(self, error: Exception) -> None:
        """A copy was made, and was lost on its way."""


class SnapshotFetcher(Protocol):
    """Brings copies of the run's state to the driver."""

    def request(self) -> None:
        """Have a copy made before the next batch. Only notes it: a signal handler may call it."""

    def finish(self) -> None:
        """Bring what is on its way; after a call."""


class Engine(Protocol):
    """Starts workers, calls their remote methods, ends them.

    A user's exception in a worker arrives as itself, with its rank and its traceback there
    as a note. Workers whose call was interrupted (it failed on one of them, or Ctrl-C came in the
    driver) live on, and `undo_interrupted_call` makes them ready for the next one. An engine
    whose workers cannot go on has ended them all by the time it raises, and says why in `ended`.
    """

    @property
    def interrupted_by(self) -> BaseException | None:
        """Why the latest call was interrupted, until `undo_interrupted_call`."""

    def undo_interrupted_call(self) -> None:
        """Take all workers back to the last committed step.

        Blocks until each of them has come out of what it is doing. Where there is no way back, the
        workers are ended, and `ended` says why.
        """

    @property
    def ended(self) -> BaseException | None:
        """Why there are no workers any more."""

    @property
    def started(self) -> list[StartReport]:
        """What each worker's `start` returned, by rank."""

    def call(
        self,
        call: RemoteCall[Worker, R],
        *,
        on_progress: OnProgress | None = None,
        retries: int = 3,
    ) -> list[R]:
        """Perform `call` on every worker, concurrently; results by rank.

        Args:
            on_progress: called now and then in the driver with rank 0's progress; where metrics of
                single steps are asked for, with all workers' rows.
            retries: failures of the group that are recovered from, where that can be done.
        """

    def call_rank(self, rank: int, call: RemoteCall[Worker, R]) -> R:
        """Perform `call` on one worker."""

    def start_snapshot_fetcher(self, to: SnapshotKeeper) -> SnapshotFetcher:
        """Give `to` the copies of the state that workers make from now on."""

    def local_operator(self) -> TrainingOperator | None:
        """The operator of rank 0, if rank 0 lives in this process."""

    def set_num_shards(self, num_shards: int) -> None:
        """A state was loaded: global batches are cut into as many shards from now on."""

    def status(self) -> PoolStatus:
        """How many workers there are, and what happened to them."""

    def close(self, *, force: bool) -> None:
        """End all workers and give back what they used; `force` does not ask them first."""
