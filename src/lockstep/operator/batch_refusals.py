# SPDX-License-Identifier: Apache-2.0
"""Refusals of batches that a layer, a loss or a wrapper of the user's would count wrongly.

A `SyncBatchNorm` layer would take its statistics of a part of the global batch, or of a borrowed
batch's rows twice; a wrapper of the user's own gives a borrowed batch the weight of any other. A
backward within `compute_loss` is reduced at once, for which each worker has to compute one shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lockstep.errors import NotAvailableError, PerShardLossError, WeightError
from lockstep.operator.loop_protocols import rank_and_step

if TYPE_CHECKING:
    from lockstep.operator.loop_protocols import Operator
    from lockstep.operator.shard_batch import ShardBatch


def weight_of_inner_backward(operator: Operator, shard: ShardBatch) -> int | WeightError:
    """What a backward within `compute_loss` counts for.

    Returns:
        The number of samples; an error, which the backward raises, where another worker may run
        more or fewer backwards.
    """
    state = operator._lockstep
    if state.context.options.accumulate > 1:
        cause = "with accumulate, nothing is reduced before the window's last batch"
    elif len(state.global_batch.shards) > 1:
        cause = "this worker computes several shards, and other workers may compute one"
    elif state.global_batch.has_empty_shards:
        cause = "a worker has no samples in this step, and computes no loss"
    else:
        return shard.num_samples
    return WeightError(
        "a backward within compute_loss cannot be reduced",
        where=f"{type(operator).__name__}, {rank_and_step(operator)}",
        cause=cause,
        fix="add what it differentiates to the loss that compute_loss returns; for a gradient of"
        " the inputs call torch.autograd.grad(loss, inputs)",
    )


def weight_without_sync_error(where: str, got: str) -> NotAvailableError:
    """The error for a weight of the user's own where nobody would apply it."""
    return NotAvailableError(
        "a weight needs lockstep's synchronisation, which wrap_ddp=False turned off",
        where=where,
        got=got,
        fix="TorchTrainer(..., wrap_ddp=True)",
    )


def refuse_norms_of_one_shard(operator: Operator) -> None:
    """Refuse layers that would normalise by one of several shards.

    Raises:
        PerShardLossError: a module shares statistics between workers.
    """
    _refuse_norms(
        operator,
        "sees one shard here, and means the whole global batch",
        "write `joint_loss = True` in the operator: its worker's shards then go through as"
        " one batch",
    )


def refuse_borrowed_batch(operator: Operator) -> None:
    """Refuse a borrowed batch (see `lockstep.data.sharded_loader`) that would count: its rows in
    batch statistics, or its gradient where the user's own wrapper synchronises.

    Raises:
        PerShardLossError: a module shares statistics between workers.
        NotAvailableError: nobody would give the batch's gradient its weight of zero.
    """
    state = operator._lockstep
    if state.context.world_size == 1:
        return
    fix = "drop_last=True in the loader, or a batch size that leaves every worker some"
    _refuse_norms(
        operator, "would count rows of another worker: this one has no samples in this step", fix
    )
    if state.registered is not None and not state.context.options.wrap_ddp:
        raise NotAvailableError(
            "a weight of zero needs lockstep's synchronisation, which wrap_ddp=False turned off",
            where=f"{type(operator).__name__}, {rank_and_step(operator)}",
            cause="this worker has no samples in this step; a wrapper of your own would count what"
            " it computes as the others' batches",
            fix=f"{fix}; or TorchTrainer(..., wrap_ddp=True)",
        )


def _refuse_norms(operator: Operator, what: str, fix: str) -> None:
    state = operator._lockstep
    if state.registered is None:
        return
    if state.sync_norms is None:
        state.sync_norms = [
            name or type(module).__name__
            for root in state.registered.modules()
            for name, module in root.named_modules()
            if isinstance(module, nn.SyncBatchNorm) and module.training
        ]
    if state.sync_norms:
        raise PerShardLossError(
            f"SyncBatchNorm {what}",
            where=f"{type(operator).__name__}, {rank_and_step(operator)}",
            got=", ".join(f"`{name}`" for name in state.sync_norms[:5]),
            fix=fix,
        )
