# SPDX-License-Identifier: Apache-2.0
"""The refusal of `SyncBatchNorm` layers where they would see a part of the global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.errors import PerShardLossError
from lockstep.operator.loop_protocols import rank_and_step

if TYPE_CHECKING:
    from lockstep.operator.loop_protocols import Operator


def is_computed_per_shard(operator: Operator, batch: Any) -> bool:
    """Whether the default loop computes the global batch of `batch` in several shards.

    A single shard is the whole global batch; of several shards, also on one worker, each is a part
    of it, as on several workers.

    Raises:
        PerShardLossError: a module would share statistics between some of the shards.
    """
    state = operator._lockstep
    if batch is not state.step or state.context.shard_assignment.num_shards == 1:
        return False
    if state.step.shards:
        _refuse_norms(
            operator,
            "sees one shard here, and means the whole global batch",
            "write `joint_loss = True` in the operator: its worker's shards then go through as"
            " one batch",
        )
    return True


def refuse_borrowed_batch(operator: Operator) -> None:
    """Refuse a borrowed batch (see `lockstep.data.sharded_loader`), whose rows would enter the
    batch statistics twice.

    Raises:
        PerShardLossError: a module shares statistics between workers.
    """
    if operator._lockstep.context.world_size > 1:
        _refuse_norms(
            operator,
            "would count rows of another worker: this one has no samples in this step",
            "drop_last=True in the loader, or a batch size that leaves every worker some",
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
