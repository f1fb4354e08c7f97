# SPDX-License-Identifier: Apache-2.0
"""`LoopRun`: a worker's side of one `train` or `validate`, over one or more epochs.

A `LoopRun` outlives a failure of the group: the steps committed before stay counted, and the call
goes on from there with the workers that are left.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from lockstep.keys import (
    NUM_STEPS,
    SCHEDULER_STEP,
    SCHEDULER_STEP_EPOCH,
    USE_FP16,
)
from lockstep.operator import TrainingOperator
from lockstep.operator.custom_loop_refusals import (
    refuse_kept_parts,
    refuse_late_reduction,
    warn_of_borrowed_counts,
)
from lockstep.operator.default_loops import require_metrics, step_batch_schedulers
from lockstep.operator.mixed_tensors import explain_mixed_tensors
from lockstep.operator.nan_origin import explain_non_finite_error
from lockstep.operator.registered_schedulers import step_schedulers
from lockstep.operator.registration import registered_parts
from lockstep.randomness import derive_seed, preserve_rng_state, seed_all
from lockstep.reduction_context import ReductionContext, activate
from lockstep.worker.batch_iterator import BatchIterator
from lockstep.worker.committed_counts import CommittedCounts
from lockstep.worker.report import LoopCounts, PassResult, Report
from lockstep.worker.validation_start import ValidationStart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from lockstep.operator.loop_protocols import PassIterator
    from lockstep.operator.operator_state import OperatorState
    from lockstep.worker.data_cursor import Cursor
    from lockstep.worker.rollback import Rollback

_COUNT_EVERY_S: Final = 0.25


@dataclass(frozen=True)
class LoopRequest:
    """The arguments of one `train` or `validate`.

    Attributes:
        purpose: "train" or "validation".
        num_steps: global batches; None for the rest of the epoch.
        profile: time the phases.
        info: the user's `info` argument.
        interrupted_at: the progress of all workers in this call, if a failure interrupted it.
        rows_known: the last step of which the driver has the rows (see `StepLog`).
        number: of the call, which it keeps where it goes on after a failure.
    """

    purpose: str
    num_steps: int | None
    profile: bool
    info: Mapping[str, Any]
    interrupted_at: LoopProgress | None = None
    rows_known: int = 0
    number: int = field(default_factory=count().__next__, compare=False)


@dataclass(frozen=True)
class LoopProgress:
    """How far all workers have come in a call that a failure has interrupted.

    Attributes:
        epoch: the epoch in which the call began.
        step: the step of that epoch with which the call began.
        steps: global batches that the call has committed.
        pass_began: global batches that it had committed when its present pass over the data began.
        is_over: the call has done all that was requested.
    """

    epoch: int
    step: int
    steps: int
    pass_began: int
    is_over: bool


class LoopRun:
    """One worker's side of a call.

    Args:
        operator: the operator whose loops run.
        cursor: the position in the data, which the call advances.
        request: the arguments of the call.
        arithmetic: a context manager entered around the passes.
        on_commit: called after every step.
        rollback: copies what a step may change until it is committed; None for validation.
        num_batches_to_recompute: batches of earlier calls that are computed again first, for an
            open window.

    Attributes:
        cursor: the position in the data.
        committed: the steps and samples committed so far.
        limit: global batches to commit; None for the rest of the epoch.
        is_over: the call has done all that was requested.
        counted: a recent copy of the samples and sums, for other threads.
    """

    def __init__(
        self,
        operator: TrainingOperator,
        cursor: Cursor,
        request: LoopRequest,
        *,
        arithmetic: Callable[[], AbstractContextManager[None]],
        on_commit: Callable[[], None] | None,
        rollback: Rollback | None,
        num_batches_to_recompute: int,
    ) -> None:
        self._operator = operator
        self._state: OperatorState = operator._lockstep
        self.cursor = cursor
        self.request = request
        self.limit = request.num_steps
        self._info = {
            **request.info,
            NUM_STEPS: request.num_steps,
            USE_FP16: operator.use_fp16,
            SCHEDULER_STEP: operator.scheduler_step_freq,
        }
        self._arithmetic = arithmetic
        self._rollback = rollback
        self.committed = CommittedCounts(
            steps=-num_batches_to_recompute, on_commit=on_commit, limit=self.limit
        )
        self.first_epoch, self.first_step = cursor.epoch, cursor.step + num_batches_to_recompute
        self.is_over = False
        self._shards = self._state.context.shard_assignment.shards
        self._pass_began = 0
        self._batches: BatchIterator | None = None
        self._counted_at = time.monotonic()
        self.counted: LoopCounts | None = None
        # A worker that joins in the middle has not computed the earlier steps.
        progress = request.interrupted_at
        self._steps_of_others = 0 if progress is None else progress.steps
        if progress is not None:
            self._set_progress(progress)
        self._passes: list[PassResult] = []
        self._state.begin_call(request.purpose)
        self._start: ValidationStart | None = None
        operator.timers.reset()
        operator.timers.enable() if request.profile else operator.timers.disable()

    @property
    def progress(self) -> LoopProgress:
        return LoopProgress(
            self.first_epoch, self.first_step, self.committed.steps, self._pass_began, self.is_over
        )

    @property
    def total_steps(self) -> int | None:
        """Global batches that the call will commit; None if the data has no length."""
        asked, in_epoch = self.limit, self.cursor.steps_per_epoch
        if asked is not None or in_epoch is None:
            return asked
        return in_epoch - self.first_step

    @property
    def own_steps(self) -> int:
        """The number of steps of the call that this process has computed itself."""
        return self.committed.steps - self._steps_of_others

    def catch_up(self, progress: LoopProgress) -> None:
        """Count a step that this worker took part in, and that only the others committed."""
        counted = max(self.committed.steps, 0)
        first, missed = self.first_step + counted, max(progress.steps - counted, 0)
        # The shards of that step: since then the shards may have been assigned to fewer workers.
        samples = self.cursor.source.samples_of(self._shards, first, missed) or 0
        self.committed.samples += samples
        self._state.meters.n += samples
        self._set_progress(progress)

    def _set_progress(self, progress: LoopProgress) -> None:
        self.first_epoch, self.first_step = progress.epoch, progress.step
        self.committed.steps, self.is_over = progress.steps, progress.is_over
        self._pass_began = progress.pass_began

    def finish_step(self) -> None:
        """Commit the open step, whose loop has failed after its optimizers had stepped."""
        assert self._batches is not None
        if not self._state.global_batch.has_scheduled:
            step_batch_schedulers(self._state, self._info)
        self._batches.commit()

    def note_counts(self) -> None:
        """Copy the counts every `_COUNT_EVERY_S` for other threads, which must not read meters.

        Not within a window: after a death of this worker the others compute its batches again.
        """
        if self._rollback is not None and not self._rollback.is_settled:
            return
        now = time.monotonic()
        if now - self._counted_at < _COUNT_EVERY_S or self._operator.device.type != "cpu":
            return  # reading a number would make the host wait for the device
        self._counted_at = now
        sums = self._state.meters.state()
        self.counted = LoopCounts(self.committed.samples, sums)

    def keep_start(self, *, copies_run: bool) -> None:
        """Copy what a validation may change, for `rewind`; see `ValidationStart`.

        The copies stay as long as this rank may have to go back: where it has peers, one of which
        may fail later, until the next `train` or `validate`, or until the worker stops.
        """
        self._start = ValidationStart(self._operator, copies_run=copies_run)

    def rewind(self) -> None:
        """Move a validation back to where it began, with all that it may have changed."""
        if self._start is not None:
            self._start.restore()
        self.cursor.move_to(self.first_epoch, self.first_step)

    def run(self) -> Report:
        """Make one pass for each epoch that the call touches, until `num_steps` or the epoch's end.

        Collective:
            The operator's loop, and one exchange before a group's first step of an epoch: when the
            loop first reads, in training.
        """
        refuse_late_reduction(self._operator)
        refuse_kept_parts(self._operator)
        self._shards = self._state.context.shard_assignment.shards
        averages = self._operator.loss_reduction == "mean"
        reduction = ReductionContext(self._state.context.group, averages=averages)
        explain = explain_mixed_tensors(self._operator)
        with preserve_rng_state(), self._arithmetic(), activate(reduction), explain:
            try:
                while not self.is_over:
                    self.is_over = self._run_pass(reduction)
            finally:
                if self._state.sync is not None:
                    # That of the last batch is not that of what the user computes between calls.
                    self._state.sync.set_delivered_weight(None)
        report = self.report()
        if self._state.context.world_size == 1:
            self._start = None
        return report

    def _run_pass(self, reduction: ReductionContext) -> bool:
        """Make one pass over (the rest of) an epoch; return whether it was the call's last pass."""
        operator, cursor, committed = self._operator, self.cursor, self.committed
        purpose, num_steps = self.request.purpose, self.limit
        first_index = committed.steps - self._pass_began
        left = None if num_steps is None else num_steps - committed.steps
        # First: where the epoch ends may be what the ranks agree on.
        self._agree(left)
        # A pass that was interrupted behind its last step comes to its own end.
        if not first_index and cursor.step and cursor.ends_before(cursor.step):
            self._end_epoch()
            self._agree(left)
        self._state.begin_pass()
        if self._rollback is not None:
            self._rollback.begin_pass(cursor)
        batches = BatchIterator(
            operator,
            cursor,
            committed,
            reduction,
            limit=left,
            purpose=purpose,
            rollback=self._rollback,
        )
        self._batches = batches
        # What is drawn before the first batch: alike on all ranks, and again where a pass goes on.
        place = purpose, "pass", cursor.epoch, cursor.step - first_index
        seed_all(derive_seed(self._state.context.shard_assignment.seed, *place))
        metrics = self._run_operators_loop(batches)
        cursor.agree_if_unread()
        cursor.refuse_unread()
        batches.commit()
        samples = committed.samples - sum(each.samples for each in self._passes)
        warn_of_borrowed_counts(operator, metrics, samples, batches.num_borrowed_samples)
        over_call = self._state.names_over_call & metrics.keys()
        self._passes.append(PassResult(metrics, self._state.pass_sums, samples, over_call))
        self._pass_began = committed.steps
        if batches.is_epoch_over:
            self._end_epoch()
        finished = num_steps is None or committed.steps >= num_steps
        is_empty = not first_index and batches.num_delivered == 0
        return finished or not batches.is_epoch_over or is_empty

    def _agree(self, left: int | None) -> None:
        """Let the ranks agree on what the pass reads, of which `left` steps are to be made."""
        # A peer that has made as many steps as this rank may have returned from the call already,
        # and would not answer.
        if left is not None and left <= 0:
            return
        group = self._state.context.group
        # A validation may read on some ranks while others wait in the user's collective, so all
        # ranks agree before it runs. So may a loop without synchronised gradients.
        if self.request.purpose == "train" and self._state.sync is not None:
            self.cursor.agree_at_read(group)
        else:
            self.cursor.agree(group)

    def _run_operators_loop(self, batches: PassIterator) -> dict[str, Any]:
        operator = self._operator
        if self.request.purpose == "validation":
            result = operator.validate(batches, dict(self.request.info))
            return require_metrics(operator, "validate", result)
        self._info["epoch_idx"] = self.cursor.epoch
        with explain_non_finite_error(operator):
            result = operator.train_epoch(batches, self._info)
        return require_metrics(operator, "train_epoch", result)

    def _end_epoch(self) -> None:
        """Step the schedulers that step once an epoch, and move the cursor to the next epoch.

        Called late for an epoch of unknown length that turns out to have ended with the last call.
        Data without a batch, which may have some in the next call, makes no epoch.
        """
        operator, cursor = self._operator, self.cursor
        if not cursor.step:
            cursor.move_to(cursor.epoch, 0)
            return
        if self.request.purpose == "train":
            # A scheduler that raises, and those before it, do not step again for the same epoch.
            has_scheduled, cursor.has_scheduled = cursor.has_scheduled, True
            # A user's own `train_epoch` steps its schedulers, unless it called the default one.
            wanted = operator.scheduler_step_freq == SCHEDULER_STEP_EPOCH and (
                self._state.ran_default_epoch
                or not operator._lockstep_overrides(TrainingOperator.train_epoch)
            )
            if wanted and not has_scheduled:
                step_schedulers(registered_parts(operator).schedulers, SCHEDULER_STEP_EPOCH)
            self._state.ran_default_epoch = False
        cursor.finish_epoch()

    def report(self) -> Report:
        operator, training = self._operator, self.request.purpose == "train"
        log = self._state.step_log
        return Report(
            passes=self._passes,
            sums=self._state.meters.state(),
            samples=self.committed.samples,
            steps=self.committed.steps,
            epoch=self.cursor.epochs_entered if training else None,
            timers=operator.timers.stats() if self.request.profile else None,
            weighed_by=self._state.weighed_by.get(self.request.purpose),
            torchmetrics=self._state.registered_metrics.copy_to_cpu(self.request.purpose),
            rows=log.rows_after(0)[1] if training and log is not None else [],
            shadow_checks=[] if self._state.shadow is None else self._state.shadow.report(),
        )
