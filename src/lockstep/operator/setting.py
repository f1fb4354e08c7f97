# SPDX-License-Identifier: Apache-2.0
"""Where an operator finds itself: its rank, its device, and how it was asked to train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lockstep.group import Group
from lockstep.sync import ShardOrder

if TYPE_CHECKING:
    from lockstep.operator.precision import PrecisionName


@dataclass(frozen=True)
class Setting:
    """Everything about its place that a worker tells its operator, fixed for a generation.

    Attributes:
        shards: the contiguous shards of every global batch that this worker carries.
        scheduler_step_freq: "batch", "epoch", "manual", or None without schedulers.
        wrap_ddp: False leaves synchronisation to the user's own wrapper.
        add_dist_sampler: False lets every worker read its own loader as it is.
        bucket_cap_mb: how large a bucket of gradients grows before it is sent, in MiB.
        reproducible: add gradients up in the order of the shards, so that the weights are the
            same bits whoever carries which shard.
        accumulate: global batches that one optimizer step of the default loop consumes.
        clip_grad_norm: largest norm of the whole gradient that the default loop lets through.
    """

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Group = field(default_factory=lambda: Group(None))
    num_shards: int = 1
    shards: range = range(1)
    seed: int = 0
    precision: PrecisionName = "fp32"
    use_tqdm: bool = False
    scheduler_step_freq: str | None = None
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    bucket_cap_mb: float = 25.0
    reproducible: bool = False
    accumulate: int = 1
    clip_grad_norm: float | None = None


def shard_order(setting: Setting) -> ShardOrder | None:
    """The order in which gradients are added up; None where any order will do."""
    if not setting.reproducible:
        return None
    size, shards = setting.world_size, setting.num_shards
    by_rank = [shards_of(rank, size, shards) for rank in range(size)]
    return ShardOrder(shards, by_rank, setting.world_rank)


def shards_of(rank: int, world_size: int, num_shards: int) -> range:
    """The contiguous shards that `rank` carries; each shard is carried by exactly one rank."""
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)
