# SPDX-License-Identifier: Apache-2.0
"""Between two calls, takes a worker back to the beginning of an open accumulation window.

An undo of a window, a state that is saved within it, and a recovery all go back to its beginning,
and its batches are computed again. So what is to stay has to be there at its beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.worker.committed_counts import CommittedCounts

if TYPE_CHECKING:
    from lockstep.worker.worker import Worker


def return_to_window(worker: Worker) -> bool:
    """Undo the batches of an open window, which the next call computes again.

    Returns:
        False, and nothing has changed, if there is no window but a loop's own, or if the window
        cannot be undone.
    """
    cursor = worker.cursors.get("train")
    if cursor is None or not cursor.has_open_window or not worker.can_undo_window:
        return False
    state = worker.operator._lockstep
    before = state.committed
    done = worker.rollback.undo(cursor, CommittedCounts())
    worker.num_batches_to_recompute += before - state.committed
    return done
