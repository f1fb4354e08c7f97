# SPDX-License-Identifier: Apache-2.0
"""What lockstep keeps in an operator, under one name that a user's attributes cannot hit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.metrics import AverageMeterCollection
from lockstep.operator.precision import Precision
from lockstep.operator.registered_metrics import RegisteredMetrics
from lockstep.operator.shard_batch import ShardBatch, WindowPosition
from lockstep.operator.step_actions import StepActions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from lockstep.metrics.step_log import StepLog
    from lockstep.operator.prefetched_batches import PrefetchedBatches
    from lockstep.operator.rank_context import RankContext
    from lockstep.operator.running_statistics import BufferSnapshot
    from lockstep.operator.training_parts import TrainingParts
    from lockstep.sync import Synchroniser


def _no_copies() -> None:
    """Of a worker that keeps no copies there is nothing to put back."""


class OperatorState:
    """The seam between an operator and the worker that runs it.

    Attributes:
        registered: what `register` was given; None before.
        loaders: what `register_data` was given, by purpose.
        step_actions: what the default loop does to models and optimizers.
        registered_metrics: what `register_metrics` was given.
        purpose: "train" or "validation": of the call that runs.
        delivered: the plain batch in hand; None between batches, and while shards are.
        read_ahead: what the user's own `train_epoch` has read; None in all other loops.
        place: where the batch in hand stands in its accumulation window.
        committed: global batches that have happened since the run began.
        weighed_by: what the default loops' losses count for, by purpose, once one was computed.
        ran_default_epoch: the default `train_epoch` ran in this pass, maybe from the user's.
        meters: the metrics of the whole call.
        summary: what the default loop returned for this pass; None if it did not run.
        partial: the weights of the latest batch's metrics that not all of its shards reported.
        latest: the metrics of the latest batch, for the progress bar.
        is_default_step: the default loop lets an optimizer step, with all that belongs to it.
        has_scheduled: schedulers had their turn after the batch in hand.
        num_computed: how often the batch in hand went through the default `train_batch`.
        stepped: the optimizers that stepped since a global batch was over, one entry a step.
        window: the parts since the window that is open began, with the `batch_info` of each.
        steps_taken_back: optimizers' steps in the batch in hand that `check_finite` undid.
        put_buffers_back: gives buffers the values that they had before the step that is open.
        buffers_before: the buffers before the window that is open; None with windows of one batch.
        step_log: metrics of single steps; None where nobody wants them.
        joint_norms: the modules that share statistics between workers; looked up once a call.
    """

    def __init__(self, config: Mapping[str, Any], context: RankContext) -> None:
        self.config = dict(config) if type(config) is dict else config
        self.context = context
        self.precision = Precision(context.options.precision, context.device)
        self.registered: TrainingParts | None = None
        self.loaders: dict[str, Any] = {}
        self.step_actions = StepActions()
        self.registered_metrics = RegisteredMetrics()
        self.delivered: ShardBatch | None = None
        self.read_ahead: PrefetchedBatches | None = None
        self.place = WindowPosition(opens=True, closes=True)
        self.committed = 0
        self.weighed_by: dict[str, str] = {}
        self.ran_default_epoch = False
        self.is_default_step = False
        self.num_computed = 0
        self.has_scheduled = False
        self.stepped: list[torch.optim.Optimizer] = []
        self.step_log: StepLog | None = None
        self.window: list[tuple[ShardBatch, Mapping[str, Any]]] = []
        self.steps_taken_back = 0
        self.put_buffers_back: Callable[[], None] = _no_copies
        self.buffers_before: BufferSnapshot | None = None
        self.begin_call("train")

    def begin_call(self, purpose: str) -> None:
        """A new `train` or `validate`: its metrics start from nothing."""
        self.purpose = purpose
        self.forget_step()
        self.registered_metrics.reset()
        self.meters = AverageMeterCollection()
        self.summary: dict[str, Any] | None = None
        self.partial: dict[str, float] = {}
        self.latest: dict[str, Any] = {}
        self.joint_norms: list[str] | None = None

    def forget_step(self) -> None:
        """What was noted of a step that did not come to its end."""
        self.stepped, self.num_computed, self.has_scheduled = [], 0, False

    def forget_counts(self) -> None:
        """What the call has counted so far is not its own."""
        self.registered_metrics.reset()
        self.meters.reset()

    def is_borrowed(self) -> bool:
        """Whether the batch in hand is another worker's, counted there."""
        return self.delivered is not None and self.delivered.borrowed

    @property
    def sync(self) -> Synchroniser | None:
        return None if self.registered is None else self.registered.sync
