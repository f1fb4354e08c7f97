# SPDX-License-Identifier: Apache-2.0
"""Which sample goes where: exact, the same at any number of workers, resumable."""

from lockstep.data.batch_size import ShardBatchSize, split_batch_size
from lockstep.data.plan_checks import check_agreement
from lockstep.data.ray_dataset import RayBatches, RayShare
from lockstep.data.shard_loader import RankLoader, shard_loader
from lockstep.data.shard_placement import ShardPlacement, shards_of
from lockstep.data.sharded_loader import LoadedPart, ShardedLoader, Step
from lockstep.data.unsharded import Unsharded

__all__ = [
    "LoadedPart",
    "RankLoader",
    "RayBatches",
    "RayShare",
    "ShardBatchSize",
    "ShardPlacement",
    "ShardedLoader",
    "Step",
    "Unsharded",
    "check_agreement",
    "shard_loader",
    "shards_of",
    "split_batch_size",
]
