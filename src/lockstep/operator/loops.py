# SPDX-License-Identifier: Apache-2.0
"""The loops of an operator that brings none of its own.

One optimizer step consumes one global batch. A worker computes its shards one after the
other, each from the committed buffers and from its own random numbers, weighs each shard's
loss by its samples, and lets the last backward (or, without samples, an empty turn) run the
reduction: so the step depends on the shards alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lockstep.data.batch_structure import leading_length
from lockstep.errors import (
    ConfigurationError,
    NonFiniteError,
    NotAvailableError,
    WrongTypeError,
)
from lockstep.keys import NUM_SAMPLES, SCHEDULER_STEP, SCHEDULER_STEP_BATCH
from lockstep.metrics import AverageMeterCollection
from lockstep.operator.batch_metrics import class_accuracy, mean_over_shards
from lockstep.operator.loss_weights import (
    BY_SAMPLES,
    Result,
    partial_weights,
    step_counts,
    take_weight,
)
from lockstep.operator.registration import step_schedulers
from lockstep.operator.running_statistics import BufferSnapshot, RunningStatistics
from lockstep.operator.shard_batch import ShardBatch, WorkerBatch
from lockstep.operator.shard_computation import computing, computing_alone

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from lockstep.operator import TrainingOperator
    from lockstep.operator.training_parts import TrainingParts


def registered(operator: TrainingOperator) -> TrainingParts:
    if operator._lockstep.registered is None:
        raise ConfigurationError(
            f"{type(operator).__name__} has no model to train",
            fix="call self.register(models=..., optimizers=...) inside setup",
        )
    return operator._lockstep.registered


def the_only(operator: TrainingOperator, attribute: str, items: list[Any]) -> Any:
    """`self.model` (or `.optimizer`, `.criterion`), or the only one that was registered."""
    found = getattr(operator, attribute, None)
    if found is None and len(items) == 1:
        found = items[0]
    if found is None:
        none = f"register({attribute}=...), or override compute_loss"
        several = (
            f"set self.{attribute} in setup, or override compute_loss (one optimizer)"
            " or train_batch (several)"
        )
        raise ConfigurationError(
            f"the default loop needs self.{attribute}, and {len(items) or 'none'} was registered",
            where=type(operator).__name__,
            fix=several if items else none,
        )
    return found


class _Recorder:
    """Metrics of one pass, for who called the loop, and of the whole call, for the driver.

    A mean of means is wrong on uneven shards, so workers send sums. A call may touch several
    epochs, and the user's own `train_epoch` around ours gets each pass's summary, as a plain
    dict to extend; what it leaves as it is the driver takes from the sums.
    """

    def __init__(self, operator: TrainingOperator) -> None:
        self._operator = operator
        self._pass = AverageMeterCollection()
        # The first pass of a call is all of the call so far, which need not be counted twice.
        if operator._lockstep.meters.is_empty:
            operator._lockstep.meters = self._pass
        self._call = operator._lockstep.meters

    def add(self, metrics: Mapping[str, Any]) -> None:
        samples = counted(self._operator, metrics)
        partial, self._operator._lockstep.partial = self._operator._lockstep.partial, {}
        log = self._operator._lockstep.step_log
        if log is not None and self._operator._lockstep.purpose == "train":
            log.add(metrics, samples, partial)
        self._pass.update(metrics, n=samples, partial=partial)
        if self._call is not self._pass:
            self._call.update(metrics, n=samples, partial=partial)

    def summary(self) -> dict[str, Any]:
        summary = self._pass.summary()
        self._operator._lockstep.summary = dict(summary)
        return summary


# ------------------------------------------------------------------------------- training


def train_epoch(
    operator: TrainingOperator, iterator: Iterable[Any], info: dict[str, Any]
) -> dict[str, Any]:
    parts = registered(operator)
    operator._lockstep.step_actions.set_training(parts, True)
    operator._lockstep.ran_default_epoch = True
    recorder = _Recorder(operator)
    with operator.timers.record("train_epoch"):
        for batch_idx, batch in enumerate(iterator, getattr(iterator, "first_index", 0)):
            batch_info = {**info, "batch_idx": batch_idx, "global_step": operator.global_step}
            _note_window(operator, batch, batch_info)
            result = operator.train_batch(batch, batch_info)
            metrics = checked_metrics(operator, "train_batch", result)
            follow_batch(operator, info)
            recorder.add(metrics)
            operator._lockstep.latest = metrics
            if operator._lockstep.place.closes:
                operator._lockstep.window.clear()
    return recorder.summary()


def follow_batch(operator: TrainingOperator, info: Mapping[str, Any]) -> None:
    """Let schedulers step that step with each batch."""
    if info.get(SCHEDULER_STEP) == SCHEDULER_STEP_BATCH and operator._lockstep.place.closes:
        step_schedulers(registered(operator).schedulers)
    operator._lockstep.has_scheduled = True


def _note_window(operator: TrainingOperator, batch: Any, batch_info: Mapping[str, Any]) -> None:
    """What a gradient that is not finite may have come from; see `explaining`."""
    state = operator._lockstep
    if state.place.opens:
        state.window.clear()
    if state.context.options.check_finite:
        state.window.extend((part, batch_info) for part in shard_batches(operator, batch))


def checked_metrics(operator: TrainingOperator, method: str, result: Any) -> dict[str, Any]:
    """What a user's method returned, if it is a dict of metrics."""
    if isinstance(result, dict):
        return result
    loss = "train_loss" if method.startswith("train") else "val_loss"
    raise WrongTypeError(
        f"{method} returned something else than metrics",
        where=f"{type(operator).__name__}.{method}",
        expected="a dict from names to values",
        got="None" if result is None else f"{type(result).__name__}: {result!r:.60}",
        fix=f'end {method} with: return {{"{loss}": loss.item()}}',
    )


def counted(operator: TrainingOperator, metrics: Mapping[str, Any]) -> int:
    """How many samples a step's metrics stand for; a borrowed batch stands for none."""
    delivered = operator._lockstep.delivered
    if delivered is not None and delivered.borrowed:
        return 0
    fallback = 1 if delivered is None else delivered.num_samples
    return int(metrics.get(NUM_SAMPLES, fallback))


def train_batch(
    operator: TrainingOperator, batch: Any, batch_info: dict[str, Any]
) -> dict[str, Any]:
    run = registered(operator)
    optimizer = the_only(operator, "optimizer", run.optimizers)
    parts = shard_batches(operator, batch)
    if operator._lockstep.place.opens:
        _open_window(operator, run, optimizer)
    in_order = operator._lockstep.context.options.reproducible
    own_weights = operator._lockstep.weighed_by.get("train") != BY_SAMPLES
    buffers = RunningStatistics(run.modules(), len(parts), run.sync, may_discard=own_weights)
    results: list[Result] = []
    for position, part in enumerate(parts):
        buffers.begin_part(position)
        reduces = operator._lockstep.place.closes and position == len(parts) - 1
        with computing(operator, batch, part.num_samples):
            metrics, weight = _train_part(operator, part, batch_info, reduces)
        results.append((metrics, weight))
        buffers.end_part(position, counts=weight > 0)
        if in_order and run.sync is not None and not reduces:
            run.sync.take_shard(part.shard)
    if run.sync is not None and operator._lockstep.place.closes and not parts:
        run.sync.reduce_pending()
    buffers.commit()
    operator._lockstep.num_computed += 1
    if operator._lockstep.place.closes:
        with operator.timers.record("apply"):
            _step(operator, run, optimizer)
    operator._lockstep.partial = partial_weights(results)
    return {**mean_over_shards(results), **step_counts(operator, "train", parts, results)}


def _step(operator: TrainingOperator, run: TrainingParts, optimizer: torch.optim.Optimizer) -> None:
    state = operator._lockstep
    state.is_default_step = True
    try:
        state.step_actions.step(operator, run, optimizer)
    except NonFiniteError:
        # A `train_batch` around this one may catch it, and leave this step out.
        state.put_buffers_back()
        raise
    finally:
        state.is_default_step = False


def _open_window(
    operator: TrainingOperator, run: TrainingParts, optimizer: torch.optim.Optimizer
) -> None:
    # What an abandoned window left (a state was loaded in the middle of one) is gone.
    if run.sync is not None and run.sync.has_open_window:
        run.sync.forget_window()
    operator._lockstep.step_actions.zero_grad(optimizer)
    if operator._lockstep.context.options.accumulate > 1:
        operator._lockstep.buffers_before = BufferSnapshot(run.plain_modules())


def shard_batches(operator: TrainingOperator, batch: Any) -> tuple[ShardBatch, ...]:
    """The shards of a delivered batch; a batch that the user cut himself is one part."""
    if isinstance(batch, WorkerBatch):
        return batch.parts
    delivered = operator._lockstep.delivered
    if delivered is not None and delivered.batch is batch:
        return (delivered,)
    if delivered is None:
        return (ShardBatch(batch, leading_length(batch), seed=0),)
    # A copy of a borrowed batch (moved, augmented, cut) is as little our own as the batch.
    samples = 0 if delivered.borrowed else leading_length(batch)
    return (ShardBatch(batch, samples, delivered.seed),)


def _train_part(
    operator: TrainingOperator, part: ShardBatch, batch_info: dict[str, Any], reduces: bool
) -> Result:
    part.seed_randomness()
    with operator.timers.record("fwd"), operator._lockstep.precision.autocast():
        batch = operator.to_device(part.batch)
        loss, metrics = _loss_and_metrics(operator, batch, batch_info)
    weight = take_weight(operator, "train", part, metrics)
    with operator.timers.record("grad"):
        scaled = operator._lockstep.precision.scale(loss)
        step_actions = operator._lockstep.step_actions
        with step_actions.around_backward(scaled), _turn(operator, part, reduces):
            backward(operator, scaled, weight)
    return {"train_loss": _reported(operator, loss, part), **metrics}, weight


def loss_again(
    operator: TrainingOperator, part: ShardBatch, batch_info: Mapping[str, Any]
) -> torch.Tensor:
    """The loss of a part once more, with the same random numbers."""
    part.seed_randomness()
    with operator._lockstep.precision.autocast(), computing_alone(operator, part.num_samples):
        return _loss_and_metrics(operator, operator.to_device(part.batch), batch_info)[0]


def _turn(
    operator: TrainingOperator, part: ShardBatch, reduces: bool
) -> AbstractContextManager[None]:
    """Around a part's backward: whether it reduces, and as which of the shards in order."""
    sync = operator._lockstep.sync
    if sync is None:
        return nullcontext()
    if not reduces:
        return sync.no_sync()
    in_order = operator._lockstep.context.options.reproducible
    return sync.last_shard(part.shard) if in_order else nullcontext()


def _reported(operator: TrainingOperator, loss: torch.Tensor, part: ShardBatch) -> torch.Tensor:
    """The loss per sample: sums over parts of different size are not comparable."""
    per_sample = operator.loss_reduction == "mean" or part.borrowed
    return loss.detach() if per_sample else loss.detach() / part.num_samples


def _loss_and_metrics(
    operator: TrainingOperator, batch: Any, batch_info: Mapping[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    result = operator.compute_loss(batch, batch_info)
    pair = result if isinstance(result, tuple) else (result, {})
    loss, metrics = pair if len(pair) == 2 else (result, {})
    is_scalar = isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex()
    if not is_scalar or not isinstance(metrics, Mapping):
        raise ConfigurationError(
            "compute_loss returned something else than a loss",
            where=type(operator).__name__,
            expected="a real scalar tensor, or a real scalar tensor and a dict of metrics",
            got=" and ".join(map(_kind, result)) if isinstance(result, tuple) else _kind(result),
            fix="return loss.mean() or (loss, {'name': value})",
        )
    return loss, dict(metrics)


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"


def backward(operator: TrainingOperator, loss: torch.Tensor, weight: float | None) -> None:
    sync = operator._lockstep.sync
    if sync is None:
        if (
            weight is not None
            and operator._lockstep.context.world_size > 1
            and operator._lockstep.registered
        ):
            _refuse_weight_without_sync(operator, weight)
        loss.backward()
        return
    delivered, ahead = operator._lockstep.delivered, operator._lockstep.read_ahead
    if weight is None:
        sync.delivered_weight()
        # A loop that reads ahead ends after the iteration has; the last weight still holds.
        weight = None if delivered is None else delivered.num_samples
    # Whatever a borrowed batch holds is counted elsewhere, and a step that weighs its tokens
    # does not know that it is borrowed.
    elif ahead is not None:
        where = f"rank {operator.world_rank}, step {operator.global_step}"
        weight = ahead.counted(weight, where)
    elif operator._lockstep.is_borrowed():
        weight = 0
    if ahead is not None:
        ahead.note_backward()
    sync.backward(loss, weight=weight)


def _refuse_weight_without_sync(operator: TrainingOperator, weight: float) -> None:
    delivered = operator._lockstep.delivered
    if delivered is not None and weight != delivered.num_samples:
        raise NotAvailableError(
            "a weight needs lockstep's synchronisation, which wrap_ddp=False turned off",
            got=f"weight={weight}",
            fix="TorchTrainer(..., wrap_ddp=True)",
        )


def default_loss(operator: TrainingOperator, batch: Any) -> tuple[torch.Tensor, Any, Any]:
    """Loss, output and target of a batch ``(*features, target)``."""
    run = registered(operator)
    model = the_only(operator, "model", run.models)
    criterion = the_only(operator, "criterion", [run.criterion] if run.criterion else [])
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise ConfigurationError(
            "the default compute_loss does not understand this batch",
            where=type(operator).__name__,
            expected="(*features, target)",
            got=f"{type(batch).__name__}"
            + (f" with keys {sorted(map(str, batch))}" if isinstance(batch, dict) else ""),
            fix="override compute_loss(self, batch, batch_info)",
        )
    *features, target = batch
    output = model(*features)
    loss = criterion(output, target)
    operator._lockstep.registered_metrics.observe(operator._lockstep.purpose, output, target)
    return loss, output, target


def default_prediction(operator: TrainingOperator, batch: Any) -> Any:
    """The model's output for a batch as `default_loss` takes it, or one without a target."""
    run = registered(operator)
    # No gradient, no wrapper: the user's own DDP would wait for ranks that have no batch left.
    models = run.models if operator._lockstep.context.options.wrap_ddp else run.plain_models()
    model = models[0] if len(models) == 1 else the_only(operator, "model", models)
    if isinstance(batch, torch.Tensor):
        return model(batch)
    if not isinstance(batch, tuple | list) or not batch:
        raise ConfigurationError(
            "the default predict_batch does not understand this batch",
            where=type(operator).__name__,
            expected="(*features, target), (feature,) or a tensor",
            got=_kind(batch)
            + (f" with keys {sorted(map(str, batch))}" if isinstance(batch, dict) else ""),
            fix="override predict_batch(self, batch, batch_info)",
        )
    return model(*(batch if len(batch) == 1 else batch[:-1]))


# ----------------------------------------------------------------------------- validation


def validate(
    operator: TrainingOperator, iterator: Iterable[Any], info: dict[str, Any]
) -> dict[str, Any]:
    operator._lockstep.step_actions.set_training(registered(operator), False)
    recorder = _Recorder(operator)
    with torch.no_grad(), operator.timers.record("validation"):
        for batch_idx, batch in enumerate(iterator):
            result = operator.validate_batch(batch, {**info, "batch_idx": batch_idx})
            metrics = checked_metrics(operator, "validate_batch", result)
            recorder.add(metrics)
            operator._lockstep.latest = metrics
    return recorder.summary()


def validate_batch(
    operator: TrainingOperator, batch: Any, batch_info: dict[str, Any]
) -> dict[str, Any]:
    own_loss = operator._overrides("compute_loss")
    parts = shard_batches(operator, batch)
    results: list[Result] = []
    for part in parts:
        part.seed_randomness()
        with (
            operator.timers.record("eval_fwd"),
            operator._lockstep.precision.autocast(),
            computing(operator, batch, part.num_samples),
        ):
            moved = operator.to_device(part.batch)
            if own_loss:
                loss, metrics = _loss_and_metrics(operator, moved, batch_info)
            else:
                loss, output, target = default_loss(operator, moved)
                metrics = class_accuracy(output, target)
        weight = take_weight(operator, "validation", part, metrics)
        results.append(({"val_loss": _reported(operator, loss, part), **metrics}, weight))
    operator._lockstep.partial = partial_weights(results)
    return {**mean_over_shards(results), **step_counts(operator, "validation", parts, results)}
