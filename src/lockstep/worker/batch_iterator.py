# SPDX-License-Identifier: Apache-2.0
"""`BatchIterator`: gives an operator its global batches, and commits each step.

A step is committed when the operator asks for the next batch or leaves its loop: everything that
the operator does with a batch lies before. Only then do the position in the data and the step count
move, so that a step which failed half-way has not happened.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.data import RayDatasetShard
from lockstep.data.batch_rows import rows_of
from lockstep.operator.batch_refusals import refuse_borrowed_batch
from lockstep.operator.custom_loop_refusals import refuse_skipped_batch
from lockstep.operator.global_batch_context import GlobalBatchContext
from lockstep.operator.loop_protocols import Operator, rank_and_step
from lockstep.operator.read_ahead_batches import ReadAheadBatches
from lockstep.operator.shard_batch import ShardBatch
from lockstep.operator.shard_results import BY_SAMPLES
from lockstep.operator.weight_averages import update_averages
from lockstep.randomness import derive_seed, seed_all
from lockstep.sync import GradientSync

if TYPE_CHECKING:
    from lockstep.data import Step
    from lockstep.errors import WeightError
    from lockstep.reduction_context import ReductionContext
    from lockstep.sync import Synchroniser
    from lockstep.worker.committed_counts import CommittedCounts
    from lockstep.worker.data_cursor import Cursor
    from lockstep.worker.rollback import Rollback


class BatchIterator:
    """The iterator that `train_epoch` and `validate` receive; it ends with the epoch.

    Args:
        reduction: the ranks over which the batches' losses become one.
        limit: global batches to deliver at most; None for the rest of the epoch.
        purpose: "train" or "validation", part of every seed.
        rollback: remembers what a step changes until it is committed; None for validation.

    Attributes:
        num_delivered: global batches so far.
        num_borrowed_samples: samples of another worker that a loop of the user's own was given.
    """

    def __init__(
        self,
        operator: Operator,
        cursor: Cursor,
        committed: CommittedCounts,
        reduction: ReductionContext,
        *,
        limit: int | None,
        purpose: str,
        rollback: Rollback | None,
    ) -> None:
        self._operator = operator
        self._state = operator._lockstep
        self._cursor = cursor
        self._committed = committed
        self._reduction = reduction
        self._limit = limit
        self._purpose = purpose
        self._rollback = rollback
        self._num_open_samples: int | None = None
        overrides = purpose == "train" and operator._lockstep_overrides(Operator.train_epoch)
        may_read_ahead = overrides and cursor.source.joint
        self._read_ahead: ReadAheadBatches | None = None
        if may_read_ahead and self._state.has_peers:
            self._read_ahead = ReadAheadBatches(partial(rank_and_step, operator))
        self._may_be_earlier = may_read_ahead and self._read_ahead is None
        self._state.global_batch = GlobalBatchContext(
            reduction,
            purpose,
            read_ahead=self._read_ahead,
            may_be_earlier=self._may_be_earlier,
        )
        self.num_delivered = 0
        self.num_borrowed_samples = 0
        self.is_epoch_over = False
        total = cursor.steps_per_epoch
        rest = None if total is None else total - cursor.step
        self._length = rest if rest is None or limit is None else min(rest, limit)

    def __iter__(self) -> BatchIterator:
        return self

    def __len__(self) -> int:
        """Global batches of this pass, from its first one on; as a loader's, it does not change.

        Raises:
            TypeError: the data has no length.
        """
        if self._length is None:
            raise TypeError("this data has no length")
        return self._length

    def __next__(self) -> Any:
        while True:
            self.commit()
            if self._committed.before_batch is not None:
                self._committed.before_batch()
            at_limit = self._limit is not None and self.num_delivered >= self._limit
            read = None if self.is_epoch_over or at_limit else self._cursor.take()
            if read is None:
                self.is_epoch_over = self.is_epoch_over or not at_limit
                self._check_epoch_end()
                self._note_end_of_data()
                raise StopIteration
            self._num_open_samples = sum(part.num_samples for part in read.parts)
            self.num_delivered += 1
            # No parts: this worker has no samples, and nobody waits for it. A loop that takes plain
            # batches does not see this batch.
            if read.parts or not self._cursor.source.joint:
                return self._deliver(read)

    @property
    def step_in_epoch(self) -> int:
        """Committed global batches of this epoch, those of earlier calls included."""
        return self._cursor.step

    def commit(self) -> None:
        """Commit the open step; without one, only update averages after optimizers that stepped.

        Raises:
            PeerLostError: the group was given up meanwhile; whether the step has happened on all
                ranks is unknown.
        """
        state, global_batch = self._state, self._state.global_batch
        state.context.group.confirm()
        training = self._purpose == "train"
        if training and state.registered is not None:
            # Without an open batch as well: a loop may step once more after its last one.
            stepped, global_batch.stepped_optimizers = global_batch.stepped_optimizers, []
            update_averages(state.registered, stepped)
            if stepped or self._num_open_samples is not None:  # else the loop's end, after a batch
                self._committed.has_stepped = bool(stepped)
        if self._num_open_samples is None:
            return
        if training:
            refuse_skipped_batch(self._operator)
        self._cursor.commit()
        self._committed.steps += 1
        if self._committed.steps > 0:
            self._committed.samples += self._num_open_samples
        else:
            state.forget_counts()
        self._num_open_samples = None
        state.global_batch = global_batch.between_batches()
        # The weight stays, for a plain backward behind the last batch.
        self._reduction.is_borrowed = False
        if training:
            state.committed += 1
            self._operator.global_step = state.committed
            self._note_window(global_batch)
            if self._rollback is not None:
                self._rollback.settle(self._cursor)
            if state.step_log is not None:
                is_settled = self._rollback is None or self._rollback.is_settled
                epoch = self._cursor.epochs_entered
                place = self._cursor.epoch, self._cursor.step - 1
                state.step_log.commit(state.committed, epoch, place, is_settled=is_settled)
        self._check_epoch_end()
        if self._committed.on_commit is not None:
            self._committed.on_commit()

    def _note_window(self, global_batch: GlobalBatchContext) -> None:
        every = self._state.context.options.accumulate
        if global_batch.closes_window or self._cursor.step % every == 0:
            self._cursor.window_start = self._cursor.step

    def _check_epoch_end(self) -> None:
        # A source with a length is asked at its end; other sources end by running out.
        step = self._cursor.step
        if not self.is_epoch_over and step == self._cursor.steps_per_epoch:
            self.is_epoch_over = self._cursor.ends_before(step)

    def _deliver(self, read: Step) -> Any:
        """Make a batch's `GlobalBatchContext`, and tell the gradient sync that its step begins.

        Returns:
            The context, for the default loops; the plain batch, for a loop of the user's own.
        """
        state, sync, training = self._state, self._state.sync, self._purpose == "train"
        run_seed, epoch = state.context.shard_assignment.seed, self._cursor.epoch
        shards = tuple(
            ShardBatch.of(part, run_seed, self._purpose, epoch, read.index) for part in read.parts
        )
        is_joint = self._cursor.source.joint
        global_batch = GlobalBatchContext(
            self._reduction,
            self._purpose,
            shards,
            is_joint,
            read_ahead=self._read_ahead,
            may_be_earlier=self._may_be_earlier,
            has_empty_shards=read.has_empty_shards,
            counts_samples=self._counts_samples,
        )
        if training:
            global_batch.opens_window, global_batch.closes_window = self._place_in_window(read)
            if self._rollback is not None:
                self._rollback.keep(self._cursor, self._committed)
            if sync is not None:
                sync.begin_step(state.committed)
        state.global_batch = global_batch
        # In the default loops `GlobalBatchContext.activate_shard` sets the weight of each shard.
        self._reduction.weight = shards[0].num_samples if is_joint else None
        self._reduction.is_borrowed = global_batch.is_borrowed
        if not is_joint:
            return global_batch
        if global_batch.is_borrowed:
            asked = read.parts[0].num_asked
            self.num_borrowed_samples += rows_of(shards[0].batch) or 0 if asked is None else asked
            if training:
                refuse_borrowed_batch(self._operator)
        if sync is not None:
            weight = self._weight_of_plain_backward(sync, shards[0])
            miscount = shards[0].miscount if training and self._reduction.averages else None
            global_batch.weight = weight if miscount is None else miscount
            sync.set_delivered_weight(global_batch.weight)
        shards[0].seed_randomness()
        return shards[0].batch

    def _place_in_window(self, read: Step) -> tuple[bool, bool]:
        """Whether a batch opens and closes a window: the global batches of one optimizer step.

        Windows begin with the epoch; the last window of an epoch may be shorter.
        """
        every = self._state.context.options.accumulate
        if every == 1:
            return True, True
        is_full = (read.index + 1) % every == 0
        # A pass over a Ray dataset that a limit ends is not gone on with.
        is_left = self.num_delivered == self._limit and isinstance(
            self._cursor.source, RayDatasetShard
        )
        closes = is_full or is_left or self._cursor.ends_before(read.index + 1)
        return read.index == self._cursor.window_start, closes

    def _counts_samples(self) -> bool:
        return self._state.weighed_by.get(self._purpose) == BY_SAMPLES

    def _weight_of_plain_backward(self, sync: Synchroniser, read: ShardBatch) -> int | WeightError:
        """The weight of a plain backward: this batch's samples, or an error if the loop has read
        batches ahead that count differently."""
        ahead = self._read_ahead
        if ahead is None:
            return read.num_samples
        assert isinstance(sync, GradientSync), "with peers"
        ahead.note_read(read, sync.progress)
        if ahead.has_equal_batches:
            return read.num_samples
        if ahead.has_borrowed_batch:
            self._reduction.is_borrowed = ahead.unknown_rows_error()
        return ahead.unknown_weight_error()

    def _note_end_of_data(self) -> None:
        ahead, sync = self._read_ahead, self._state.sync
        if ahead is not None and isinstance(sync, GradientSync):
            ahead.note_end(sync.progress)
        if ahead is None or not ahead.is_behind:
            # What is drawn after the last batch, of which each rank had another shard.
            place = self._purpose, "end", self._cursor.epoch, self._cursor.step
            seed_all(derive_seed(self._state.context.shard_assignment.seed, *place))
