# SPDX-License-Identifier: Apache-2.0
"""Which sample goes where: exact, the same at any number of workers, resumable."""

from lockstep.data.agreement import check_agreement
from lockstep.data.batch_size import ShardBatchSize, split_batch_size
from lockstep.data.placement import Placement, shards_of
from lockstep.data.ray_dataset import RayBatches, RayShare
from lockstep.data.shard_loader import RankLoader, shard_loader
from lockstep.data.sharded import Part, ShardedLoader, Step
from lockstep.data.unsharded import Unsharded

__all__ = [
    "Part",
    "Placement",
    "RankLoader",
    "RayBatches",
    "RayShare",
    "ShardBatchSize",
    "ShardedLoader",
    "Step",
    "Unsharded",
    "check_agreement",
    "shard_loader",
    "shards_of",
    "split_batch_size",
]
