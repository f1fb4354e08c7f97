# SPDX-License-Identifier: Apache-2.0
"""`SnapshotTaker`: copies a run's state between two steps of a call, for checkpoints.

All ranks hold the same state, so rank 0 copies it, and the other ranks wait for rank 0 in their
next step. Two things differ between ranks: what is in shards, of which each rank holds a copy of
its part (`CheckpointPart`), and what is each rank's own (`StateAccess.per_rank_state`).
For them all ranks take part in a snapshot. So the step at which a snapshot is due follows from a
number that is equal on all ranks: the steps of the run.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.errors import NotAvailableError
from lockstep.worker import state_broadcast
from lockstep.worker.checkpoint_part import CheckpointPart
from lockstep.worker.per_rank_state import add_every_rank
from lockstep.worker.snapshot import Snapshot
from lockstep.worker.state_dict import copy_to_cpu
from lockstep.worker.tensor_pool import TensorPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.worker.committed_counts import CommittedCounts
    from lockstep.worker.state_access import StateAccess


class SnapshotTaker:
    """Takes a worker's snapshots when they are due; holds the latest until the driver fetches it.

    `pop_latest` and `request` alone may be called from another thread.

    Attributes:
        part: this rank's part of the latest snapshot, where no rank has the whole state.
        give: called with each snapshot in the worker's own process, instead of holding it.
    """

    def __init__(self, worker: StateAccess) -> None:
        self.give: Callable[[Snapshot], None] | None = None
        self._worker = worker
        self._counted_to: int | None = None
        self._is_requested = False
        self._has_seen_step = False
        self._lock = threading.Lock()
        self._latest: Snapshot | None = None
        self._pool = TensorPool()
        self._in_transit: Snapshot | None = None
        self.part = CheckpointPart(worker)

    # ---------------------------------------------------------------- from another thread

    def request(self) -> None:
        """Copy the state before the next batch, due or not."""
        self._is_requested = True

    def pop_latest(self) -> Snapshot | None:
        """Return the latest snapshot once. The next call means that the driver wrote this one."""
        if self._in_transit is not None:
            self._in_transit.give_back()
        with self._lock:
            self._in_transit, self._latest = self._latest, None
        return self._in_transit

    def finish(self, timeout_s: float | None = None) -> None:
        """Do nothing (see `SnapshotFetcher`): in the driver's process no snapshot is in transit."""

    def drop(self) -> None:
        """Drop the copies that nobody has fetched or begun to write: the run leaves their steps."""
        self.part.drop()
        self._hold(None)

    # --------------------------------------------------------------------------- training

    def begin(self) -> None:
        """Count steps from here, at the beginning of a call or of a generation of the group."""
        if self._counted_to is None or self._counted_to > self._committed:
            self._counted_to = self._committed

    def refuse_uncollectable_states(self) -> None:
        """Refuse copies that all ranks take together, where each rank counts its own steps.

        Raises:
            NotAvailableError: `checkpoint_every` asks for such copies.
        """
        spec = self._worker.spec
        counts_alone = spec.num_workers > 1 and not spec.options.add_dist_sampler
        if spec.checkpoint_every is not None and counts_alone and self._needs_all_ranks:
            raise NotAvailableError(
                "checkpoints cannot be taken in the middle of training here",
                got="add_dist_sampler=False, and a state that no rank knows alone",
                cause="every rank has steps of its own, so there is none for all to stop at",
                fix="leave checkpoint_every out, and call save(path) between calls",
            )

    def forget(self, last_known: int) -> None:
        """Restart the count, because ranks may have taken different snapshots before a recovery.

        Args:
            last_known: the step of the newest snapshot that no death of a worker can take away: the
                driver has it. Of one that consists of the ranks' parts, it has to be on the disk. A
                later one may be lost with a worker that has died, and is due again.
        """
        self.part.drop()
        if self._worker.rank != 0:
            self._hold(None)  # as rank 0 again, much later, it would hand an old step over
        self._counted_to = last_known
        self.begin()

    def forget_parts(self) -> None:
        """Drop the copies of this rank's part that nobody has begun to write."""
        self.part.drop()
        if self._worker.spec.saves_parts:
            with self._lock:
                self._latest = None

    def before_batch(self, committed: CommittedCounts) -> bool:
        """Between two batches, take a snapshot if one is due or requested.

        Collective:
            Where `_needs_all_ranks`, when a copy is due: every rank.

        Returns:
            Whether a copy was taken from which training goes on.
        """
        is_settled = self.is_settled(committed)
        self._has_seen_step |= committed.has_stepped
        if self._is_requested and not self._needs_all_ranks:
            self._take_requested_snapshot(is_settled, committed)
        if not self._is_due or not is_settled or (self._has_own_loop and self._needs_all_ranks):
            return False
        # The variables of a user's `train_epoch` cannot be copied between two batches, so
        # `after_call` takes the snapshot.
        if self._worker.has_own_epoch:
            return False
        self._look_for_end(committed)
        self._copy()
        return True

    def _look_for_end(self, committed: CommittedCounts) -> None:
        """Before a copy in the middle of a call: find out whether the epoch is over.

        A run that goes on from the copy would begin an epoch too many otherwise, or end one too
        soon. The call reads the next batch in any case, unless it ends here.
        """
        if not committed.is_at_limit:
            self._worker.cursors["train"].look_for_end()

    def is_settled(self, committed: CommittedCounts) -> bool:
        """Whether no gradients wait for the next batch; the same on every rank."""
        # A step ends the window of a loop of the user's own.
        return committed.has_stepped if self._has_own_loop else self._is_between_windows

    def after_call(self, committed: CommittedCounts) -> bool:
        """After a call of `train`, take the snapshot that was not possible within the call.

        Only a user's `train_epoch` knows whether gradients wait in it for the next call.

        Collective:
            Where `_needs_all_ranks`, when a copy is due: every rank.

        Returns:
            As `before_batch`.
        """
        self._has_seen_step |= committed.has_stepped
        if not self._is_due or not (
            self._worker.has_own_epoch or self._is_settled_after_call(committed)
        ):
            return False
        self._copy()
        return True

    def _is_settled_after_call(self, committed: CommittedCounts) -> bool:
        if not self._has_own_loop or committed.has_stepped:
            return self.is_settled(committed)
        # A loop that steps no optimizer, but writes weights itself, has no windows. A worker that
        # has joined may not have seen the steps that the others have.
        steps = self._has_seen_step
        if self._needs_all_ranks:
            steps = any(self._worker.operator._lockstep.context.group.exchange(steps))
        return not steps

    @property
    def _committed(self) -> int:
        return self._worker.operator._lockstep.committed

    @property
    def _is_due(self) -> bool:
        every = self._worker.spec.checkpoint_every
        if every is None or self._counted_to is None:
            return False
        return self._committed // every > self._counted_to // every

    @property
    def _needs_all_ranks(self) -> bool:
        spec = self._worker.spec
        return spec.saves_parts or (spec.num_workers > 1 and bool(self._worker.per_rank_keys))

    @property
    def _has_own_loop(self) -> bool:
        return self._worker.operator._lockstep_overrides_loop()

    @property
    def _is_between_windows(self) -> bool:
        """Whether no gradients of the default loop wait for the next batch."""
        return not self._worker.cursors["train"].has_open_window

    def _take_requested_snapshot(self, is_settled: bool, committed: CommittedCounts) -> None:
        """Take the snapshot that the driver has requested before the end of the call."""
        if self._worker.rank != 0:
            self._is_requested = False
        elif self._worker.before_call is not None:
            before = self._worker.before_call
            self._keep(Snapshot(before["global_step"], before))
        elif is_settled:
            self._look_for_end(committed)
            self._copy()

    def _copy(self) -> None:
        """Copy the state of the run as it is now.

        Collective:
            Where `_needs_all_ranks`, every rank.
        """
        worker = self._worker
        self._counted_to = self._committed
        if worker.spec.saves_parts:
            step = self.part.copy()
            if worker.rank == 0:
                self._keep(Snapshot(step, None, call=worker.call_number))
            return
        state: dict[str, Any] = {}
        if worker.rank == 0:
            state = worker.state_dict(partial(copy_to_cpu, clone=self._pool.copy_of))
            self._pool.clear()
        if self._needs_all_ranks:
            keys = worker.per_rank_keys
            own = {key: state[key] for key in keys} if state else worker.per_rank_state()
            state = add_every_rank(state, self._by_rank(own))
        if worker.rank == 0:
            snapshot = Snapshot(state["global_step"], state, self._pool, worker.call_number)
            self._keep(snapshot)

    def _by_rank(self, own: Any) -> list[Any]:
        """`own` of every rank, on rank 0; on the others what they have sent."""
        worker, found = self._worker, []
        group = worker.operator._lockstep.context.group
        for source in range(worker.spec.num_workers):
            if source == worker.rank:
                state_broadcast.send(group, own)
                found.append(own)
            elif worker.rank == 0:
                found.append(state_broadcast.receive(group, source))
            else:
                state_broadcast.decline(group, source)
        return found

    def _keep(self, snapshot: Snapshot) -> None:
        self._is_requested = False
        if self.give is not None:
            self.give(snapshot)
        else:
            self._hold(snapshot)

    def _hold(self, snapshot: Snapshot | None) -> None:
        with self._lock:
            unfetched, self._latest = self._latest, snapshot
        if unfetched is not None:
            unfetched.give_back()
