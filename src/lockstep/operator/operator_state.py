# SPDX-License-Identifier: Apache-2.0
"""`OperatorState`: everything that lockstep stores in an operator, as its `_lockstep`."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.metrics import AverageMeterCollection
from lockstep.operator.evaluation_writes import EvaluationWrites
from lockstep.operator.global_batch_context import GlobalBatchContext
from lockstep.operator.in_place_writes import InPlaceWriteTracker
from lockstep.operator.mixed_precision import Precision
from lockstep.operator.registered_torchmetrics import RegisteredMetrics
from lockstep.operator.shadow import Shadow
from lockstep.operator.step_actions import StepActions
from lockstep.operator.writes_behind_steps import WritesBehindSteps
from lockstep.reduction_context import ReductionContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from lockstep.metrics.step_log import StepLog
    from lockstep.operator.rank_context import RankContext
    from lockstep.operator.shadow import ShadowedStep
    from lockstep.operator.shard_batch import ShardBatch
    from lockstep.operator.shard_buffers import BufferSnapshot
    from lockstep.operator.training_parts import TrainingParts
    from lockstep.sync import Synchroniser


class Counts(Protocol):
    """What is counted in every step, and must not count a step twice."""

    def begin_call(self) -> None:
        """Forget what a call of `train` or `validate` has counted for its result."""

    def mark(self) -> Any: ...

    def restore(self, mark: Any) -> None: ...


@dataclass
class WindowBatches:
    """The global batches that one optimizer step consumes, while it gathers their gradients.

    Attributes:
        batches: the shards computed so far, each with its `batch_info`: those from which a
            gradient that is not finite may have come.
        buffers_before: the models' buffers before the window; None if it is of one batch.
    """

    batches: list[tuple[ShardBatch, Mapping[str, Any]]] = field(default_factory=list)
    buffers_before: BufferSnapshot | None = None


def _no_copies() -> None:
    """The `put_buffers_back` of an operator without `Rollback`, which has no copies of buffers."""


def _no_epochs() -> int:
    """The `epochs_finished` of an operator whose worker has not opened its loaders."""
    return 0


class OperatorState:
    """The state that the worker and the default loops share through an operator.

    Attributes:
        config: the trainer's, as this worker sees it. Set by `TrainingOperator.__init__`.
        context: rank, device, group and options. Set by `TrainingOperator.__init__`; replaced by
            the worker when the group is formed anew or a state with other shards is loaded.
        precision: autocast and loss scaling. Its scale is set by `state_dict.apply`.
        registered: the arguments of `register`; None before. Set by `TrainingOperator.register`.
        loaders: the arguments of `register_data`, by purpose.
        registered_metrics: the arguments of `register_metrics`. Reset by `begin_call`.
        step_actions: the default loop's calls on models and optimizers. Replaced by an
            integration's `setup`.
        global_batch: the current one. Set by `BatchIterator` at each delivery and commit; reset by
            `begin_call` and `forget_step`.
        window: the batches and buffers of the accumulation window that is open. Filled and cleared
            by the default loop.
        in_place_writes: the weights that batches write to before an optimizer steps. Takes copies
            where `Rollback` opens a step, or where the default loop needs them.
        evaluation_writes: takes back what forwards write in the default `validate`, and in
            `predict`. Learns in them to which weights that is.
        writes_behind_steps: what an integration's hooks write behind the optimizer's step. Noted by
            the integration; settled where the group forms anew.
        committed: global batches that have happened since the run began. Set by
            `BatchIterator.commit`, by `Rollback` and by `state_dict.apply`.
        weighed_by: the unit of the default loops' weights (samples or the user's own), by purpose,
            once a loss was computed. Set by `ShardResults.weight_of`; a worker that joins takes it
            over from its source.
        ran_default_epoch: the default `train_epoch` ran in this epoch, maybe called by the user's.
            Set by that loop and by `state_dict.apply`, reset by `LoopRun` at the end of an epoch.
        meters: the metrics of the whole call. Reset by `begin_call`; set back by `Rollback`.
        pass_sums: the sums behind the metrics that the default loop returned for this pass; None if
            it did not run. Reset by `begin_pass`.
        names_over_call: which metrics of this pass's result cover the call from its beginning, see
            `PassResult`. Set by an integration; reset by `begin_pass`.
        latest: the metrics of the latest batch, for the progress bar. Reset by `begin_call`.
        shadow: compares shards with other workers; None without ``shadow_every``.
        step_log: metrics of single steps; None unless the trainer asks for them. Set by the worker.
        sync_norms: names of the layers that share batch statistics between workers. Looked up once
            a call; None: not yet.
        unheld: registered parameters that the default loop's optimizer does not hold. Listed once a
            call; None: not yet.
        steps_taken_back: optimizers' steps of the open step that `check_finite` undid. Reset by
            `Rollback` where a step opens.
        further_counts: what an integration counts itself. Set by its `setup`; marked by `Rollback`
            where a step opens, and set back where it undoes the step.
        is_uncounted: what is computed was counted before, or is counted by another worker. Set by
            `without_counting`.
        runs_after_step: the user's `after_step` runs. Set by the hooks on optimizers' steps.
        have_stepped: the optimizers that have stepped since the worker started. Filled by the hooks
            on optimizers' steps.
        has_warned_of_optimizers_left: `warn_of_optimizers_left` has. Set by it.
        has_warned_of_borrowed_counts: `warn_of_borrowed_counts` has. Set by it.
        put_buffers_back: gives buffers the values that they had before the open step. Set by
            `Rollback`.
        epochs_finished: counts the passes over the training data that were completed. Set by the
            worker.
    """

    def __init__(self, config: Mapping[str, Any], context: RankContext) -> None:
        self.config = config
        self.context = context
        self.precision = Precision(context.options.precision, context.device)
        self.registered: TrainingParts | None = None
        self.loaders: dict[str, Any] = {}
        self.step_actions = StepActions()
        self.registered_metrics = RegisteredMetrics()
        every, limit = context.options.shadow_every, context.options.shadow_limit
        self.shadow = Shadow(every, limit) if every else None
        self.window = WindowBatches()
        self.in_place_writes = InPlaceWriteTracker()
        self.evaluation_writes = EvaluationWrites(self.in_place_writes)
        self.writes_behind_steps = WritesBehindSteps()
        self.committed = 0
        self.weighed_by: dict[str, str] = {}
        self.ran_default_epoch = False
        self.step_log: StepLog | None = None
        self.steps_taken_back = 0
        self.further_counts: list[Counts] = []
        self.is_uncounted = False
        self.runs_after_step = False
        self.have_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.has_warned_of_optimizers_left = False
        self.has_warned_of_borrowed_counts = False
        self.put_buffers_back: Callable[[], None] = _no_copies
        self.epochs_finished: Callable[[], int] = _no_epochs
        self.begin_call("train")

    @property
    def is_set_up(self) -> bool:
        """Whether the user's `setup` is over."""
        return self.registered is not None and self.registered.trained_after_setup is not None

    def begin_call(self, purpose: str) -> None:
        """Begin a `train` or `validate`: its metrics start from nothing."""
        self.global_batch = GlobalBatchContext(ReductionContext(self.context.group), purpose)
        self.meters = AverageMeterCollection()
        if not self.is_uncounted:  # a call that goes on has counts from before
            self.forget_counts()
        if self.shadow is not None:
            self.shadow.begin_call()
        self.begin_pass()
        self.latest: dict[str, Any] = {}
        self.sync_norms: list[str] | None = None
        self.unheld: list[nn.Parameter] | None = None

    def begin_pass(self) -> None:
        """Begin a pass over (a part of) an epoch, whose result is not known yet."""
        self.pass_sums: dict[str, Any] | None = None
        self.names_over_call: frozenset[str] = frozenset()

    @property
    def _counts(self) -> tuple[Counts, ...]:
        """What is counted in a call beside its `meters`."""
        return (self.registered_metrics, *self.further_counts)

    def mark_counts(self) -> list[Any]:
        """What has been counted so far, beside the call's `meters`, for `restore_counts`."""
        return [each.mark() for each in self._counts]

    def restore_counts(self, marks: list[Any]) -> None:
        """Set back what has been counted since `mark_counts`."""
        for each, mark in zip(self._counts, marks, strict=True):
            each.restore(mark)

    def forget_step(self) -> None:
        """Drop the context of a step that did not come to its end."""
        self.global_batch = GlobalBatchContext(
            self.global_batch.reduction, self.global_batch.purpose
        )

    def forget_counts(self) -> None:
        """Drop the counts of the call so far: its batches were counted by an earlier call."""
        for each in self._counts:
            each.begin_call()
        self.meters.reset()

    @contextmanager
    def without_counting(self) -> Iterator[None]:
        """Inside, what is computed counts for nothing."""
        before, self.is_uncounted = self.is_uncounted, True
        try:
            yield
        finally:
            self.is_uncounted = before

    @contextmanager
    def in_validation(self) -> Iterator[None]:
        """Keep the metrics of a validation within a user's training loop out of the call's."""
        training = self.global_batch
        if training.purpose != "train":
            yield
            return
        counts = self.meters, self.pass_sums, self.latest
        mark = self.registered_metrics.mark("train", may_reset=True)
        self.meters = AverageMeterCollection()
        self.global_batch = GlobalBatchContext(training.reduction, "validation")
        try:
            yield
        finally:
            self.global_batch = training
            self.meters, self.pass_sums, self.latest = counts
            self.registered_metrics.restore(mark)

    def compare_hardware(self) -> None:
        """Refuse to compare bits between workers that are not equal; see `Shadow`."""
        if self.shadow is not None and not self.context.is_trial:
            self.shadow.compare_hardware(self.context)

    def begin_shadow(self, shards: Sequence[ShardBatch]) -> ShadowedStep | None:
        """Begin the comparison with another worker, if one is due; see `Shadow.begin_step`."""
        if self.shadow is None or self.context.is_trial:
            return None
        return self.shadow.begin_step(self.context, self.committed, shards)

    @property
    def counts_nothing(self) -> bool:
        """Whether the current batch is another worker's, or was counted before.

        Raises:
            WeightError: the user's loop reads ahead, and which batch is the current one is unknown.
        """
        ahead = self.global_batch.read_ahead
        if ahead is not None and ahead.may_be_borrowed:
            raise ahead.unknown_rows_error()
        return self.global_batch.is_borrowed or self.is_uncounted

    @property
    def sync(self) -> Synchroniser | None:
        return None if self.registered is None else self.registered.sync

    @property
    def has_peers(self) -> bool:
        """Whether batches of other workers count beside those of this one."""
        return self.sync is not None and self.sync.needs_guard
