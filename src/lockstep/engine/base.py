# SPDX-License-Identifier: Apache-2.0
"""The engine: how a driver reaches its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lockstep.operator import TrainingOperator
    from lockstep.worker import Snapshot

    Watch = Callable[[dict[str, Any]], int]


@dataclass(frozen=True)
class PoolStatus:
    """Who is there.

    Attributes:
        workers: how many train.
        spares: how many wait, ready, for the place of one that is lost.
        generation: formations of the group so far, from 0.
        recoveries: what happened, the first one first.
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
    """Starts workers, calls their methods, ends them.

    A user's exception in a worker arrives as itself, with its rank and its traceback there
    as a note. Workers that were left in the middle of a call (it failed on one of them, or the
    driver was interrupted) live on, and `settle` makes them ready for the next one. An engine
    whose workers cannot go on has ended them all by the time it raises, and says why in `ended`.
    """

    @property
    def left(self) -> BaseException | None:
        """Why the latest call was left in the middle, until `settle`."""

    def settle(self) -> None:
        """After a call that was left: take all workers back to the last committed step.

        Blocks until each of them has come out of what it is doing. Where there is no way back, the
        workers are ended, and `ended` says why.
        """

    @property
    def ended(self) -> BaseException | None:
        """Why there are no workers any more."""

    @property
    def started(self) -> list[dict[str, Any]]:
        """What each worker's `start` returned, by rank."""

    def call(
        self,
        method: str,
        *args: Any,
        watch: Watch | None = None,
        retries: int = 3,
    ) -> list[Any]:
        """Call `method` of every `Worker`, concurrently; results by rank.

        Args:
            watch: called now and then in the driver with rank 0's `progress()`; where metrics of
                single steps are asked for, with all workers' ``rows`` since the step of the run
                that it returned the last time.
            retries: failures of the group that are recovered from, where that can be done.
        """

    def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        """Call `method` of one `Worker`."""

    def bring_snapshots(self, to: SnapshotKeeper) -> SnapshotFetcher:
        """Give `to` the copies of the state that workers make from now on."""

    def local_operator(self) -> TrainingOperator | None:
        """The operator of rank 0, if rank 0 lives in this process."""

    def cut_anew(self, num_shards: int) -> None:
        """A state was loaded: global batches are cut into as many shards from now on."""

    def roster(self) -> PoolStatus:
        """Who is there."""

    def close(self, *, force: bool) -> None:
        """End all workers and give back what they used; `force` does not ask them first."""


COLLECTIVE_METHODS = frozenset({"start", "join", "train", "validate", "whole"})
"""Methods in which ranks wait for each other: a failure in one ends the group."""

METHODS_APART = frozenset(
    {
        "apply_state",
        "check_state",
        "averaged_models",
        "models",
        "operator_state",
        "position",
        "predict",
        "settle_state",
        "state_dict",
        "state_to_write",
        "steps_ahead",
    }
)
"""Methods in which no rank waits for another (in `apply_state` they do where optimizers' states are
in shards): after a failure of one the others finish on their own, behind the error, and the run
goes on."""

METHODS_BESIDE = frozenset({"verify"})
"""Methods in which ranks wait for each other over a group of their own, beside the run's: one
that fails closes it, so that all answer, and the run goes on."""
