# SPDX-License-Identifier: Apache-2.0
"""The default training and validation loops, which run unless an operator overrides them.

One optimizer step consumes one global batch, or `accumulate` of them. A worker computes its shards
one after the other. Each shard's forward starts from the committed buffers and from the shard's own
random numbers, and its loss is weighed by its samples. The backward of the last shard runs the
reduction; a worker without shards contributes zeros to it. So the step depends on the shards
alone, and not on which worker computes them.

The way of a batch: `BatchIterator.__next__` makes its `GlobalBatchContext`; `train_epoch` passes it
to the operator's `train_batch`, which computes each shard (`_train_shard`): `compute_loss`, then
`backward`, which gives the loss and its weight to the gradients' synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lockstep.errors import ConfigurationError, NonFiniteError, WrongTypeError
from lockstep.keys import SCHEDULER_STEP, SCHEDULER_STEP_BATCH
from lockstep.operator.batch_refusals import (
    refuse_norms_of_one_shard,
    weight_of_inner_backward,
    weight_without_sync_error,
)
from lockstep.operator.criterion_targets import ignores_all
from lockstep.operator.default_forward import (
    class_accuracy,
    default_loss,
    describe_value,
)
from lockstep.operator.default_loop_refusals import (
    refuse_optimizers,
    stepped_optimizer,
    warn_of_optimizers_left,
)
from lockstep.operator.loop_protocols import Operator, place_in_epoch, rank_and_step
from lockstep.operator.metrics_recorder import MetricsRecorder
from lockstep.operator.preserved_state import preserve_state
from lockstep.operator.registered_schedulers import step_schedulers
from lockstep.operator.registration import registered_parts
from lockstep.operator.shadow import ShardComputation
from lockstep.operator.shard_buffers import BufferSnapshot, ShardBuffers
from lockstep.operator.shard_results import BY_SAMPLES, ShardResults
from lockstep.operator.shard_weights import ShardWeights
from lockstep.phases import Phase, in_phase
from lockstep.sync import GradientSync
from lockstep.sync.optimizer_inspection import optimizer_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from lockstep.operator.operator_state import OperatorState
    from lockstep.operator.shadow import ShadowedStep
    from lockstep.operator.shard_batch import ShardBatch
    from lockstep.operator.training_parts import TrainingParts


# ------------------------------------------------------------------------------- training


def train_epoch(
    operator: Operator, iterator: Iterable[Any], info: dict[str, Any]
) -> dict[str, Any]:
    state = operator._lockstep
    state.step_actions.set_training(registered_parts(operator))
    state.ran_default_epoch = True
    refuse_optimizers(operator)
    recorder = MetricsRecorder(state)
    with operator.timers.record("train_epoch"):
        for batch_idx, batch in enumerate(iterator, place_in_epoch(iterator)):
            batch_info = {**info, "batch_idx": batch_idx, "global_step": operator.global_step}
            _record_shards(state, batch, batch_info)
            result = operator.train_batch(batch, batch_info)
            metrics = require_metrics(operator, "train_batch", result)
            step_batch_schedulers(state, info)
            recorder.add(metrics)
            if state.global_batch.closes_window:
                state.window.batches.clear()
    warn_of_optimizers_left(operator)
    return recorder.summary()


def _record_shards(state: OperatorState, batch: Any, batch_info: Mapping[str, Any]) -> None:
    """Keep the shards of the window, for `nan_origin` should a gradient not be finite."""
    global_batch, noted = state.global_batch, state.window.batches
    if global_batch.opens_window:
        noted.clear()
    if state.context.options.check_finite:
        noted.extend((shard, batch_info) for shard in global_batch.shards_in(batch))


def step_batch_schedulers(state: OperatorState, info: Mapping[str, Any]) -> None:
    """Step the schedulers, where ``scheduler_step_freq="batch"`` and the window closes."""
    global_batch, run = state.global_batch, state.registered
    # First: a scheduler that raises is not stepped again for the same batch.
    global_batch.has_scheduled = True
    if (
        info.get(SCHEDULER_STEP) == SCHEDULER_STEP_BATCH
        and global_batch.closes_window
        and run is not None
        # Gradients that wait are of a window of the loop's own, or of a step that was left out.
        and (global_batch.stepped_optimizers or not run.has_gradients)
    ):
        step_schedulers(run.schedulers, SCHEDULER_STEP_BATCH)


def require_metrics(operator: Operator, method: str, result: Any) -> dict[str, Any]:
    """The metrics that a user's method returned, with names (class numbers, say) made strings.

    Raises:
        WrongTypeError: `result` is no dict.
    """
    if isinstance(result, dict):
        return {str(name): value for name, value in result.items()}
    loss = "train_loss" if method.startswith("train") else "val_loss"
    raise WrongTypeError(
        f"{method} returned something else than metrics",
        where=f"{type(operator).__name__}.{method}",
        expected="a dict from names to values",
        got="None" if result is None else f"{type(result).__name__}: {result!r:.60}",
        fix=f'end {method} with: return {{"{loss}": loss.item()}}',
    )


def is_computed_per_shard(operator: Operator, batch: Any) -> bool:
    """Whether the default loop computes the global batch of `batch` in several shards.

    A single shard is the whole global batch; of several shards, also on one worker, each is a part
    of it, as on several workers.

    Raises:
        PerShardLossError: a module would share statistics between some of the shards.
    """
    state = operator._lockstep
    if batch is not state.global_batch or state.context.shard_assignment.num_shards == 1:
        return False
    if state.global_batch.shards:
        refuse_norms_of_one_shard(operator)
    return True


def train_batch(operator: Operator, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
    """Compute this worker's shards of a global batch, reduce, and step where a window closes.

    Args:
        batch: the `GlobalBatchContext`; or a plain batch, from an override that calls this method.

    Collective:
        Every rank: the gradients' reduction and the broadcast of buffers.
    """
    run, state = registered_parts(operator), operator._lockstep
    optimizer = stepped_optimizer(operator)
    global_batch = state.global_batch
    shards, sync = global_batch.shards_in(batch), run.sync
    per_shard = is_computed_per_shard(operator, batch)
    if global_batch.opens_window:
        _open_window(state, run, optimizer)
    in_order = state.context.options.reproducible
    shadowed = state.begin_shadow(shards)
    keeps_committed = shadowed is not None or _may_weigh_nothing(operator, shards)
    weights = _shard_weights(operator, len(shards), is_shadowed=shadowed is not None)
    buffers = ShardBuffers(
        run.modules(), len(shards), sync, weights, keeps_committed=keeps_committed
    )
    results = ShardResults(operator, "train")
    for position, shard in enumerate(shards):
        buffers.begin_shard(position)
        if sync is not None and (position > 0 or not global_batch.opens_window):
            sync.keep_window()  # to `compute_loss` each shard is the first
        is_last = position == len(shards) - 1
        reduces = global_batch.closes_window and is_last and shadowed is None
        with global_batch.activate_shard(shard, per_shard=per_shard):
            metrics, weight = _train_shard(operator, buffers, shard, batch_info, results, reduces)
        results.add(shard, metrics, weight)
        buffers.end_shard(position, counts=weight > 0)
        if shadowed is not None and shadowed.shard == shard.shard:
            shadowed.computed = _computed(operator, shard, metrics, weight, buffers)
        elif in_order and sync is not None and not reduces:
            sync.take_shard(shard.shard)
    if shadowed is not None:
        compute = partial(_compute_apart, operator, batch_info, buffers, per_shard=per_shard)
        _add_shadowed(operator, shadowed, compute, buffers, results)
    if sync is not None and global_batch.closes_window and (shadowed is not None or not shards):
        sync.reduce_pending()
    buffers.commit()
    weights.share(sync, has_written=bool(shards))
    global_batch.num_train_batch_calls += 1
    if global_batch.closes_window:
        with operator.timers.record("apply"):
            _step(state, run, optimizer)
    return results.metrics()


def _may_weigh_nothing(operator: Operator, shards: Sequence[ShardBatch]) -> bool:
    """Whether the weight of a shard's loss may turn out to be zero, as far as is known before."""
    run, state = registered_parts(operator), operator._lockstep
    if state.weighed_by.get("train") != BY_SAMPLES or any(each.is_borrowed for each in shards):
        return True
    if operator._lockstep_overrides(Operator.compute_loss):
        return False
    criterion = getattr(operator, "criterion", run.criterion)
    return any(ignores_all(criterion, each.batch) for each in shards)


def _shard_weights(operator: Operator, num_shards: int, *, is_shadowed: bool) -> ShardWeights:
    """What keeps the weights that forwards write in this batch, of `num_shards` of this worker."""
    state = operator._lockstep
    sync, global_batch = state.sync, state.global_batch
    is_whole = sync is None or not sync.units  # a forward that writes to a unit is refused
    # In a loop that takes plain batches a worker without samples computes a borrowed batch.
    has_idle = state.has_peers and global_batch.has_empty_shards and not global_batch.is_joint
    return ShardWeights(
        state.in_place_writes,
        registered_parts(operator),
        partial(rank_and_step, operator),
        is_compared=is_whole and (num_shards > 1 or is_shadowed),
        sharing=state.context.group if is_whole and has_idle else None,
    )


def _computed(
    operator: Operator,
    shard: ShardBatch,
    metrics: dict[str, Any],
    weight: float,
    buffers: ShardBuffers,
) -> ShardComputation:
    """What this worker has just computed from `shard`; its gradient leaves ``parameter.grad``."""
    sync = operator._lockstep.sync
    assert isinstance(sync, GradientSync), "a shadow needs peers"
    is_first = shard.shard == 0  # of the other shards' buffers none are committed
    committed = buffers.after_shard(counts=weight > 0) if is_first else None
    return ShardComputation(metrics, weight, sync.pack_shard(), committed)


def _compute_apart(
    operator: Operator,
    batch_info: dict[str, Any],
    buffers: ShardBuffers,
    shard: ShardBatch,
    *,
    per_shard: bool,
) -> ShardComputation:
    """Compute a shard as its worker does, and leave nothing behind."""
    state, results = operator._lockstep, ShardResults(operator, "train")
    assert isinstance(state.sync, GradientSync), "a shadow needs peers"
    beside = state.step_actions.beside_step()
    with beside, preserve_state(operator), state.without_counting(), state.sync.outside_window():
        buffers.put_committed()
        with state.global_batch.activate_shard(shard, per_shard=per_shard):
            metrics, weight = _train_shard(operator, buffers, shard, batch_info, results, False)
        return _computed(operator, shard, metrics, weight, buffers)


def _add_shadowed(
    operator: Operator,
    shadowed: ShadowedStep,
    compute: Callable[[ShardBatch], ShardComputation],
    buffers: ShardBuffers,
    results: ShardResults,
) -> None:
    """Let two workers' bits of a shard be compared, and go on with the right ones.

    Collective:
        Every rank: see `ShadowedStep.compare`.
    """
    sync = operator._lockstep.sync
    assert isinstance(sync, GradientSync), "a shadow needs peers"
    with operator.timers.record("shadow"):
        right = shadowed.compare(sync, compute)
    if right is None:
        return
    sync.add_shard(shadowed.shard, right.gradient)
    if right is not shadowed.computed:
        results.replace(shadowed.shard, right.metrics, right.weight)
        if right.buffers is not None:
            buffers.replace(right.buffers)


def _step(state: OperatorState, run: TrainingParts, optimizer: torch.optim.Optimizer) -> None:
    global_batch, clip_grad_norm = state.global_batch, state.context.options.clip_grad_norm
    global_batch.is_stepping = True
    try:
        state.step_actions.step(state.precision, run, optimizer, clip_grad_norm)
    except NonFiniteError:
        # A `train_batch` around this one may catch it, and leave this step out.
        state.put_buffers_back()
        raise
    finally:
        global_batch.is_stepping = False
    if global_batch.stepped_optimizers:
        state.in_place_writes.note_step()


def _open_window(
    state: OperatorState, run: TrainingParts, optimizer: torch.optim.Optimizer
) -> None:
    # Drop the gradients of an abandoned window: a state was loaded before the window closed.
    if run.sync is not None and run.sync.has_open_window:
        run.sync.forget_window()
    state.step_actions.zero_grad(optimizer)
    # Nobody else clears what the optimizer does not hold: it would add up from step to step, in the
    # norm that `clip_grad_norm` limits, and a worker that joins would not have it.
    if state.unheld is None:
        held = set(map(id, optimizer_parameters(optimizer)))
        state.unheld = [each for each in run.parameters() if id(each) not in held]
    for parameter in state.unheld:
        parameter.grad = None
    if state.context.options.accumulate > 1:
        state.window.buffers_before = BufferSnapshot(run.plain_modules())


def _train_shard(
    operator: Operator,
    buffers: ShardBuffers,
    shard: ShardBatch,
    batch_info: dict[str, Any],
    results: ShardResults,
    reduces: bool,
) -> tuple[dict[str, Any], float]:
    """Forward and backward of one shard; returns its metrics and the weight of its loss."""
    state = operator._lockstep
    is_joint = state.global_batch.is_joint  # then the batch has its weight already
    if state.sync is not None and not is_joint:
        state.sync.set_delivered_weight(weight_of_inner_backward(operator, shard))
    with operator.timers.record("fwd"), state.precision.autocast():
        moved = operator.to_device(shard.batch)
        loss, metrics = loss_and_metrics(operator, moved, batch_info)
    if state.sync is not None and not is_joint:
        state.sync.set_delivered_weight(None)
    buffers.after_forward()
    weight = results.weight_of(shard, metrics, moved)
    with operator.timers.record("grad"):
        scaled = state.precision.scale(loss)
        around = state.step_actions.around_backward(scaled, weight)
        with around, _sync_context(state, shard, reduces):
            backward(operator, scaled, weight)
    return {"train_loss": _loss_per_sample(operator, loss, shard), **metrics}, weight


@in_phase(Phase.FORWARD)
def loss_and_metrics(
    operator: Operator, batch: Any, batch_info: Mapping[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of a batch on the device, and the metrics that `compute_loss` returned beside it.

    Raises:
        ConfigurationError: `compute_loss` returned no real scalar tensor.
    """
    result = operator.compute_loss(batch, batch_info)
    pair = result if isinstance(result, tuple) else (result, {})
    loss, metrics = pair if len(pair) == 2 else (result, {})
    is_scalar = isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex()
    if not is_scalar or not isinstance(metrics, Mapping):
        raise ConfigurationError(
            "compute_loss returned something else than a loss",
            where=type(operator).__name__,
            expected="a real scalar tensor, or a real scalar tensor and a dict of metrics",
            got=" and ".join(map(describe_value, result))
            if isinstance(result, tuple)
            else describe_value(result),
            fix="return loss.mean() or (loss, {'name': value})",
        )
    return loss, dict(metrics)


def recompute_loss(
    operator: Operator, shard: ShardBatch, batch_info: Mapping[str, Any]
) -> torch.Tensor:
    """The loss of a shard once more, with the same random numbers, on this rank alone."""
    state = operator._lockstep
    # The other ranks do not compute this shard again, so a gather in its forward would hang.
    with state.global_batch.activate_shard(shard, per_shard=True), state.precision.autocast():
        return loss_and_metrics(operator, operator.to_device(shard.batch), batch_info)[0]


def _sync_context(
    state: OperatorState, shard: ShardBatch, reduces: bool
) -> AbstractContextManager[None]:
    """The context of a shard's backward, in which it reduces or leaves that to the last shard."""
    if state.sync is None:
        return nullcontext()
    if not reduces:
        return state.sync.no_sync()
    in_order = state.context.options.reproducible
    return state.sync.last_shard(shard.shard) if in_order else nullcontext()


def _loss_per_sample(operator: Operator, loss: torch.Tensor, shard: ShardBatch) -> torch.Tensor:
    """The loss per sample, for the metrics: sums over shards of different size do not compare."""
    per_sample = operator.loss_reduction == "mean" or shard.is_borrowed
    return loss.detach() if per_sample else loss.detach() / shard.num_samples


def backward_in_own_loop(
    operator: Operator, loss: torch.Tensor, weight: float | None, **backward_kwargs: Any
) -> None:
    """As `backward`, which the user's code calls with the weight that it knows, or with none."""
    if weight is not None and operator.loss_reduction == "sum":
        raise ConfigurationError(
            "a loss that is a sum has no weight",
            got=f"weight={weight!r}",
            fix="leave the weight out, or backpropagate means and leave loss_reduction out",
        )
    backward(operator, loss, weight, **backward_kwargs)


@in_phase(Phase.BACKWARD)
def backward(
    operator: Operator, loss: torch.Tensor, weight: float | None, **backward_kwargs: Any
) -> None:
    """Backpropagate a loss of the current batch, and reduce; see `TrainingOperator.backward`.

    Args:
        operator, loss, weight: as there.
        backward_kwargs: for ``Tensor.backward``.
    """
    state = operator._lockstep
    if state.sync is not None:
        if weight is None:
            state.global_batch.refuse_recount(state.sync, registered_parts(operator).parameters())
        weight = state.global_batch.weight_of_backward(weight)
        state.sync.backward(loss, weight=weight, **backward_kwargs)
        return
    joint_batch = state.global_batch.joint_batch
    has_peers = state.context.world_size > 1 and state.registered is not None
    is_own = weight is not None and joint_batch is not None and weight != joint_batch.num_samples
    if has_peers and is_own:
        raise weight_without_sync_error(rank_and_step(operator), f"weight={weight}")
    loss.backward(**backward_kwargs)


# ----------------------------------------------------------------------------- validation


def validate(operator: Operator, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:
    state = operator._lockstep
    run, timing = registered_parts(operator), operator.timers
    evaluating = run.in_evaluation()
    unchanged = state.evaluation_writes.taken_back(run, rank_and_step(operator))
    with evaluating, unchanged, state.in_validation(), torch.no_grad(), timing.record("validation"):
        recorder = MetricsRecorder(state)
        for batch_idx, batch in enumerate(iterator, place_in_epoch(iterator)):
            result = operator.validate_batch(batch, {**info, "batch_idx": batch_idx})
            recorder.add(require_metrics(operator, "validate_batch", result))
            state.evaluation_writes.end_batch()
        return recorder.summary()


@in_phase(Phase.VALIDATION)
def validate_batch(operator: Operator, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
    state = operator._lockstep
    global_batch = state.global_batch
    own_loss = operator._lockstep_overrides(Operator.compute_loss)
    per_shard = is_computed_per_shard(operator, batch)
    results = ShardResults(operator, "validation")
    for shard in global_batch.shards_in(batch):
        state.evaluation_writes.take_back()
        with (
            operator.timers.record("eval_fwd"),
            state.precision.autocast(),
            global_batch.activate_shard(shard, per_shard=per_shard),
        ):
            moved = operator.to_device(shard.batch)
            if own_loss:
                loss, metrics = loss_and_metrics(operator, moved, batch_info)
            else:
                loss, output, target = default_loss(operator, moved)
                (call,) = global_batch.criterion_calls
                metrics = class_accuracy(call.criterion, output, target)
        weight = results.weight_of(shard, metrics, moved)
        weights = {name: results.num_targets(shard, moved) for name in metrics if not own_loss}
        metrics = {"val_loss": _loss_per_sample(operator, loss, shard), **metrics}
        results.add(shard, metrics, weight, weights)
    return results.metrics()
