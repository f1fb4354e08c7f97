# SPDX-License-Identifier: Apache-2.0
"""What a loss takes part in while it is computed, and what must not be computed shard by shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lockstep import reduction_context
from lockstep.errors import PerShardLossError
from lockstep.operator.shard_batch import WorkerBatch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any

    from lockstep.operator import TrainingOperator


def reduction_of(
    operator: TrainingOperator, weight: float | None, *, per_shard: bool = False
) -> reduction_context.ReductionContext:
    """The reduction of what `operator` computes on a batch that counts `weight`."""
    return reduction_context.ReductionContext(
        operator._lockstep.context.group,
        weight,
        per_shard=per_shard,
        averages=operator.loss_reduction == "mean",
    )


def computing(
    operator: TrainingOperator, batch: Any, num_samples: int
) -> AbstractContextManager[reduction_context.ReductionContext]:
    """Around the forward and the backward of one part of `batch`, which has `num_samples`.

    With one shard in all there is nothing that a shard could leave out; with several, also on
    one worker, it is a part of the global batch, as it would be on several workers.

    Raises:
        PerShardLossError: a module would share statistics between some of the shards.
    """
    num_shards = operator._lockstep.context.placement.num_shards
    per_shard = isinstance(batch, WorkerBatch) and num_shards > 1
    if per_shard:
        _refuse_norms(
            operator,
            "sees one shard here, and means the whole global batch",
            "write `joint_loss = True` in the operator: its worker's shards then go through as"
            " one batch",
        )
    return reduction_context.activate(reduction_of(operator, num_samples, per_shard=per_shard))


def computing_alone(
    operator: TrainingOperator, num_samples: int
) -> AbstractContextManager[reduction_context.ReductionContext]:
    """Around a forward that the other ranks do not run: nothing may be gathered in it."""
    return reduction_context.activate(reduction_of(operator, num_samples, per_shard=True))


def refuse_borrowed(operator: TrainingOperator) -> None:
    """Before a batch that this worker only borrows: its rows would enter the statistics twice.

    Raises:
        PerShardLossError: a module shares statistics between workers.
    """
    if operator._lockstep.context.world_size > 1:
        _refuse_norms(
            operator,
            "would count rows of another worker: this one has no samples in this step",
            "drop_last=True in the loader, or a batch size that leaves every worker some",
        )


def _refuse_norms(operator: TrainingOperator, what: str, fix: str) -> None:
    state = operator._lockstep
    if state.registered is None:
        return
    if state.joint_norms is None:
        state.joint_norms = [
            name or type(module).__name__
            for root in state.registered.modules()
            for name, module in root.named_modules()
            if isinstance(module, nn.SyncBatchNorm) and module.training
        ]
    if state.joint_norms:
        raise PerShardLossError(
            f"SyncBatchNorm {what}",
            where=f"{type(operator).__name__}, rank {operator.world_rank},"
            f" step {operator.global_step}",
            got=", ".join(f"`{name}`" for name in state.joint_norms[:5]),
            fix=fix,
        )
