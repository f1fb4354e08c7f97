# SPDX-License-Identifier: Apache-2.0
"""`RankContext`: an operator's rank, device, group, shards and the trainer's `Options`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from lockstep.data import ShardAssignment, shards_of
from lockstep.group import Group
from lockstep.sync import ServerAddress, ShardOrder

if TYPE_CHECKING:
    from lockstep.operator.mixed_precision import PrecisionName

ONE_PROCESS: Final = "one process"
"""Internal: the whole global batch at once, by plain autograd (see `sync.single_process`)."""

ONE_PROCESS_BY_SHARD: Final = "one process, by shard"
"""Internal: as `ONE_PROCESS`, but shard after shard, each with its own random numbers."""


@dataclass(frozen=True)
class Options:
    """The trainer's arguments that every operator follows.

    Attributes:
        scheduler_step_freq: "batch", "epoch", "manual", or None without schedulers.
        sync: the name of the synchronisation of gradients (see `sync_setup`).
        replicas: device replicas in one process, with ``sync="data_parallel"``.
        wrap_ddp: False leaves synchronisation to the user's own wrapper.
        add_dist_sampler: False lets every worker read its own loader as it is.
        bucket_cap_mb: how large a bucket of gradients grows before it is sent, in MiB.
        reproducible: add gradients up in the order of the shards, so that the weights are the
            same bits at any number of workers.
        accumulate: global batches that one optimizer step of the default loop consumes.
        clip_grad_norm: largest norm of the whole gradient that the default loop lets through.
        check_finite: refuse a step whose gradients are not finite.
        shadow_every: in each so many-th step another worker computes a shard as well; 0: in none.
        shadow_limit: so many wrong shards of one worker are too many.
    """

    precision: PrecisionName = "fp32"
    use_tqdm: bool = False
    scheduler_step_freq: str | None = None
    sync: str = "replicate"
    replicas: int = 1
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    bucket_cap_mb: float = 25.0
    reproducible: bool = False
    accumulate: int = 1
    clip_grad_norm: float | None = None
    check_finite: bool = True
    shadow_every: int = 0
    shadow_limit: int = 3


@dataclass(frozen=True)
class RankContext:
    """Everything that a worker tells its operator; the worker replaces it, and never changes it.

    Attributes:
        shard_assignment: the shards of every global batch that this worker carries.
        is_trial: the operator is a copy beside the run's own, thrown away after a few steps.
        is_spare: the worker waits for the place of another one, and has no peers yet.
        server_address: of the parameter server; None without a server, or if this worker runs it.
    """

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Group = field(default_factory=lambda: Group(None))
    shard_assignment: ShardAssignment = field(
        default_factory=lambda: ShardAssignment(1, range(1), seed=0)
    )
    options: Options = field(default_factory=Options)
    is_trial: bool = False
    is_spare: bool = False
    server_address: ServerAddress | None = None


def shard_order(context: RankContext) -> ShardOrder | None:
    """The order in which gradients are added up; None where any order will do."""
    if not context.options.reproducible:
        return None
    size, num_shards = context.world_size, context.shard_assignment.num_shards
    by_rank = [shards_of(rank, size, num_shards) for rank in range(size)]
    return ShardOrder(num_shards, by_rank, context.world_rank)
