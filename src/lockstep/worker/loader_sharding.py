# SPDX-License-Identifier: Apache-2.0
"""Chooses the loader of `lockstep.data` that cuts a user's loader for an operator's loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.data import BatchParts, ShardedLoader, UserShardedLoader
from lockstep.errors import NotAvailableError
from lockstep.operator import TrainingOperator
from lockstep.operator.rank_context import ONE_PROCESS

if TYPE_CHECKING:
    from lockstep.worker.data_cursor import StepSource


def make_sharded_loader(operator: TrainingOperator, loader: Any, purpose: str) -> StepSource:
    """Cut `loader` the way `operator`'s loop for `purpose` ("train", "validation") wants it."""
    context = operator._lockstep.context
    assignment = context.shard_assignment
    if purpose == "validation":
        _refuse_own_validation(operator)
    # A user's own `validate` would count the samples of a borrowed batch (see `ShardedLoader`'s
    # module), and without a joint loss it has no collectives to take part in.
    borrows = (
        purpose == "train"
        or operator.joint_loss
        or not operator._lockstep_overrides(TrainingOperator.validate)
    )
    if not context.options.add_dist_sampler:
        # A loop of the user's own may read on some ranks while others wait in a collective of its.
        is_own = operator._lockstep_overrides(TrainingOperator.train_epoch)
        asks = purpose == "train" and not is_own
        return UserShardedLoader(loader, assignment, borrows=borrows, may_ask_peers=asks)
    parts = BatchParts.JOINT_OR_BORROWED if borrows else BatchParts.JOINT
    if not wants_joint(operator, purpose):
        parts = BatchParts.BY_SHARD
    # Each shard is seeded before its computation, so the generators' states after loading are not
    # needed.
    return ShardedLoader(loader, assignment, parts=parts, keeps_generators=False)


def _refuse_own_validation(operator: TrainingOperator) -> None:
    """Refuse a loop that cannot tell a borrowed batch, where ranks without samples need one.

    Raises:
        NotAvailableError: the model is in shards, and `validate` is the user's own.
    """
    sync = operator._lockstep.sync
    is_own = operator._lockstep_overrides(TrainingOperator.validate)
    if sync is not None and sync.communicates_in_forward and is_own:
        raise NotAvailableError(
            "a model in shards cannot be evaluated by a loop of one's own",
            where=f"{type(operator).__name__}.validate",
            cause="a rank without samples has to run the forwards of its peers, and the loop would"
            " count that batch",
            fix='override validate_batch instead; or register(shard="whole")',
        )


def wants_joint(operator: TrainingOperator, purpose: str) -> bool:
    """Whether `operator`'s loop takes all the samples of its worker as one batch."""
    training = purpose == "train"
    loop = TrainingOperator.train_epoch if training else TrainingOperator.validate
    step = TrainingOperator.train_batch if training else TrainingOperator.validate_batch
    options = operator._lockstep.context.options
    sync = operator._lockstep.sync
    # Every rank runs the same forwards, so its shards are one batch, or a borrowed one.
    joins = sync is not None and sync.communicates_in_forward
    takes_whole = joins or options.sync in (ONE_PROCESS, "data_parallel")
    is_own = operator._lockstep_overrides(loop) or operator._lockstep_overrides(step)
    return is_own or operator.joint_loss or takes_whole or not options.wrap_ddp
