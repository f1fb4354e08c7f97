# SPDX-License-Identifier: Apache-2.0
"""`DesertedRanks`: notices that the ranks in a loop wait for a rank that has left it.

A loop of the user's own may end on one rank by a number of that rank's alone. It has answered then,
and nothing has failed: its peers would wait in their next collective until the group's timeout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import DataOrderError
from lockstep.worker import OnFailure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.engine.pending_call import PendingCall
    from lockstep.worker import WorkerStatus


class DesertedRanks:
    """Watches one call after the other.

    Args:
        limit_s: how long all ranks that are left may wait at the same steps.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: tuple[int, dict[int, int]] | None = None
        self._since = 0.0

    def find_error(
        self,
        pending_call: PendingCall[Any],
        statuses: Mapping[int, WorkerStatus | None],
        now: float,
    ) -> DataOrderError | None:
        """The error that ends the call; None while it may go on.

        Args:
            statuses: of the ranks that still perform; None of a rank that does not answer.
        """
        is_loop = pending_call.contract.on_failure is OnFailure.RESUME
        waiting = {
            rank: status.steps
            for rank, status in statuses.items()
            if status is not None and status.is_in_collective
        }
        has_left = is_loop and bool(pending_call.values) and not pending_call.has_failed
        if not has_left or not waiting or len(waiting) < len(statuses):
            self._seen = None
            return None
        seen = len(pending_call.values), waiting
        if seen != self._seen:
            self._seen, self._since = seen, now
        if now - self._since <= self._limit_s:
            return None
        return _deserted_error(pending_call, waiting)


def _deserted_error(pending_call: PendingCall[Any], waiting: Mapping[int, int]) -> DataOrderError:
    name = pending_call.contract.name
    loop = "train_epoch" if name == "train" else name
    left, rank = min(pending_call.values), min(waiting)
    return DataOrderError(
        f"rank {left} left {loop} after step {pending_call.values[left].steps} of this call, and"
        f" rank {rank} waits in step {waiting[rank] + 1}",
        expected="as many steps on every rank",
        cause="a loop that ends by what one rank alone knows: its loss, its time",
        fix="leave the loop on all ranks together: let them share first what they decide by",
    )
