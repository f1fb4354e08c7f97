# SPDX-License-Identifier: Apache-2.0
"""The engine: how a driver reaches its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.operator import TrainingOperator


class Engine(Protocol):
    """Starts workers, calls their methods, ends them.

    A user's exception in a worker arrives as itself, with its rank and its traceback there
    as a note. An engine whose workers cannot go on (a rank failed inside a step, a process
    died) has ended them all by the time it raises, and says why in `ended`.
    """

    ended: BaseException | None
    started: list[dict[str, Any]]
    """What each worker's `start` returned, by rank."""

    def call(
        self, method: str, *args: Any, watch: Callable[[dict[str, Any]], None] | None = None
    ) -> list[Any]:
        """Call `method` of every `Worker`, concurrently; results by rank.

        Args:
            watch: called now and then in the driver with rank 0's `progress()`.
        """

    def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        """Call `method` of one `Worker`."""

    def local_operator(self) -> TrainingOperator | None:
        """The operator of rank 0, if rank 0 lives in this process."""

    def close(self, *, force: bool) -> None:
        """End all workers and give back what they used; `force` does not ask them first."""


COLLECTIVE_METHODS = frozenset({"start", "train", "validate", "whole"})
"""Methods in which ranks wait for each other: a failure in one ends the group."""

METHODS_BESIDE = frozenset({"verify"})
"""Methods in which ranks wait for each other over a group of their own, beside the run's: one
that fails closes it, so that all answer, and the run goes on."""
