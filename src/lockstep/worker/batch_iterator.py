# SPDX-License-Identifier: Apache-2.0
"""Global batches on their way from a loader to an operator, and the commit of a step.

A step is committed when the operator asks for the next batch or leaves its loop: everything
that it does with a batch lies between. Only then do the position in the data and the step
count move, so that a step that failed half-way is a step that did not happen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep import reduction_context
from lockstep.operator.optimizer_hooks import refuse_left_out
from lockstep.operator.prefetched_batches import PrefetchedBatches
from lockstep.operator.shard_batch import BatchOrigin, ShardBatch, WindowPosition, WorkerBatch
from lockstep.operator.shard_computation import refuse_borrowed
from lockstep.operator.weight_averages import update_averages
from lockstep.randomness import derive_seed

if TYPE_CHECKING:
    from lockstep import data
    from lockstep.data import Step
    from lockstep.errors import WeightError
    from lockstep.operator import TrainingOperator
    from lockstep.sync import Synchroniser
    from lockstep.worker.data_cursor import Cursor, Tally
    from lockstep.worker.rollback import Rollback


class BatchIterator:
    """The iterator that `train_epoch` and `validate` receive; ends with the epoch.

    Args:
        limit: global batches to deliver at most; None for the rest of the epoch.
        purpose: "train" or "validation", part of every seed.
        rollback: remembers what a step changes until it is committed; None for validation.
        first_index: the number of the first batch in its pass; 0 unless the pass was interrupted.
    """

    def __init__(
        self,
        operator: TrainingOperator,
        cursor: Cursor,
        tally: Tally,
        *,
        limit: int | None,
        purpose: str,
        rollback: Rollback | None,
        first_index: int,
    ) -> None:
        self._operator = operator
        self._state = operator._lockstep
        self._cursor = cursor
        self._tally = tally
        self._limit = limit
        self._purpose = purpose
        self._rollback = rollback
        self.first_index = first_index
        self._open: int | None = None
        own_loop = purpose == "train" and operator._overrides("train_epoch")
        self._state.read_ahead = PrefetchedBatches() if own_loop and cursor.source.joint else None
        self.delivered = 0
        self.epoch_over = False

    def __iter__(self) -> BatchIterator:
        return self

    def __len__(self) -> int:
        """Global batches left in this call; TypeError where the data has no length."""
        total = self._cursor.source.steps_per_epoch
        if total is None:
            raise TypeError("this data has no length")
        left = total - self._cursor.step
        return left if self._limit is None else min(left, self._limit - self.delivered)

    def __next__(self) -> Any:
        while True:
            self.commit()
            if self._tally.at_boundary is not None:
                self._tally.at_boundary()
            if self.epoch_over or (self._limit is not None and self.delivered >= self._limit):
                self._look_for_the_end()
                self._note_the_end()
                raise StopIteration
            step = self._cursor.take()
            if step is None:
                self.epoch_over = True
                self._note_the_end()
                raise StopIteration
            self._open = sum(part.num_samples for part in step.parts)
            self.delivered += 1
            # Without parts nothing of this step is ours, and nobody waits for us (see `borrow`).
            if step.parts or not self._cursor.source.joint:
                return self._deliver(step)

    @property
    def step_in_epoch(self) -> int:
        """Global batches of this epoch that are committed, by earlier calls as well."""
        return self._cursor.step

    def commit(self) -> None:
        """The step in hand has happened.

        Raises:
            PeerLostError: nobody knows whether it has, for the group was given up meanwhile.
        """
        self._state.context.group.confirm()
        if self._purpose == "train":
            # A loop may step once more after its last batch.
            update_averages(self._state)
        if self._open is None:
            return
        if self._purpose == "train":
            refuse_left_out(self._operator)
            self._state.num_computed, self._state.has_scheduled = 0, False
        self._cursor.commit()
        self._tally.steps += 1
        if self._tally.steps > 0:
            self._tally.samples += self._open
        else:
            self._state.forget_counts()  # an earlier call has counted them
        self._open = None
        self._state.delivered = None
        if self._purpose == "train":
            self._state.committed += 1
            self._operator.global_step = self._state.committed
            self._note_window()
            if self._rollback is not None:
                self._rollback.settle(self._cursor)
            if self._state.step_log is not None:
                is_settled = self._rollback is None or self._rollback.is_settled
                epoch = self._cursor.epochs_entered
                self._state.step_log.commit(self._state.committed, epoch, is_settled=is_settled)
        self._look_for_the_end()
        if self._tally.on_commit is not None:
            self._tally.on_commit()

    def _note_window(self) -> None:
        every = self._state.context.options.accumulate
        if self._state.place.closes or self._cursor.step % every == 0:
            self._cursor.window_start = self._cursor.step

    def _look_for_the_end(self) -> None:
        # A source of known length tells without reading on; the others tell by running out.
        if self._cursor.step == self._cursor.source.steps_per_epoch:
            self.epoch_over = True

    def _place(self, step: Step) -> WindowPosition:
        """Windows begin with the epoch; its last one is short if it does not come out even."""
        every = self._state.context.options.accumulate
        if every == 1:
            return WindowPosition(opens=True, closes=True)
        full = (step.index + 1) % every == 0
        closes = full or self._cursor.is_last(step.index)
        return WindowPosition(opens=step.index == self._cursor.window_start, closes=closes)

    def _deliver(self, step: Step) -> Any:
        if self._purpose == "train":
            self._state.place = self._place(step)
            if self._rollback is not None:
                self._rollback.keep(self._cursor, self._tally)
        parts = tuple(self._with_seed(step, part) for part in step.parts)
        sync = self._state.sync
        if sync is not None and self._purpose == "train":
            sync.begin_step(self._state.committed)
        # Each shard's is set when its turn comes.
        weight = parts[0].num_samples if self._cursor.source.joint else None
        current = reduction_context.active()
        if current is not None:
            current.weight = weight
        if not self._cursor.source.joint:
            self._state.delivered = None
            return WorkerBatch(parts)
        part = parts[0]
        if part.borrowed and self._purpose == "train":
            refuse_borrowed(self._operator)
        self._state.delivered = part
        if sync is not None:
            sync.set_delivered_weight(self._weight(sync, part.num_samples))
        part.seed_randomness()
        return part.batch

    def _with_seed(self, step: Step, part: data.LoadedPart) -> ShardBatch:
        shard = part.shards[0] if part.shards else -1
        run = self._state.context.placement.seed
        seed = derive_seed(run, self._purpose, self._cursor.epoch, step.index, shard)
        origin = BatchOrigin(self._cursor.epoch, step.index, part.indices)
        return ShardBatch(part.batch, part.num_samples, seed, shard, origin)

    def _weight(self, sync: Synchroniser, samples: int) -> int | WeightError:
        """What a backward counts for whose batch is not told: this one's, if it is certain."""
        ahead = self._state.read_ahead
        if ahead is None:
            return samples
        ahead.note_read(samples, sync.rounds)
        where = f"rank {self._operator.world_rank}, step {self._operator.global_step}"
        return samples if ahead.is_certain or not sync.needs_guard else ahead.unknown_weight(where)

    def _note_the_end(self) -> None:
        ahead, sync = self._state.read_ahead, self._state.sync
        if ahead is not None and sync is not None:
            ahead.note_the_end(sync.rounds)
