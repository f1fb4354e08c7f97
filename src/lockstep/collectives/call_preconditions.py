# SPDX-License-Identifier: Apache-2.0
"""Checks before a call of `gather` and the losses: its group, the loss reduction, its samples.

These checks read the reduction context of this rank alone; `row_agreement` compares the ranks.
"""

from __future__ import annotations

from typing import Any

from lockstep import reduction_context
from lockstep.errors import ConfigurationError, PerShardLossError, WeightError, WrongUseError
from lockstep.group import Group, resolve_group


def group_for_call(function: str, group: Any) -> Group:
    """The group that `function` communicates over; raises where it must not be called.

    Raises:
        PerShardLossError: only one shard of the global batch is being computed; in a prediction
            always.
        WrongUseError: there is no process group.
    """
    current = reduction_context.active()
    if current is not None and current.per_shard:
        is_prediction = current.purpose == "predict"
        raise PerShardLossError(
            f"{function} sees one shard here, and means the whole global batch",
            cause="predict computes shard by shard, and no worker waits for another"
            if is_prediction
            else "the operator's loss is computed shard by shard",
            fix="override predict_batch, to return what is gathered otherwise; compute what is over"
            " all rows from what predict returns"
            if is_prediction
            else "write `joint_loss = True` in the operator: its worker's shards then go through"
            " as one batch",
        )
    if group is not None:
        return resolve_group(group)
    if current is not None:
        return current.group
    found = resolve_group(None)
    if found.is_alone:
        raise WrongUseError(
            f"{function} was called without a process group",
            cause="the program was not started by torchrun, or has not called"
            " init_process_group yet",
            fix="torch.distributed.init_process_group(), or for a process alone"
            " group=lockstep.group.Group(None)",
        )
    return found


def require_mean_reduction(function: str) -> None:
    """Refuse ``loss_reduction="sum"``, under which a loss that all N ranks return counts N times.

    Raises:
        ConfigurationError: the operator's ``loss_reduction`` is "sum".
    """
    current = reduction_context.active()
    if current is not None and not current.averages:
        raise ConfigurationError(
            f"{function} returns the loss of the whole global batch on every worker, and"
            ' loss_reduction="sum" would add them up',
            fix='loss_reduction = "mean" in the operator',
        )


def has_no_samples() -> bool:
    """Whether this rank computes on a borrowed batch now (see `lockstep.data.sharded_loader`).

    Raises:
        WeightError: the loop has read ahead, and on which batch it computes is unknown.
    """
    current = reduction_context.active()
    is_borrowed = current is not None and current.is_borrowed
    if isinstance(is_borrowed, WeightError):
        raise is_borrowed
    return is_borrowed
