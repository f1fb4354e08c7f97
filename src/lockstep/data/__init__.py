# SPDX-License-Identifier: Apache-2.0
"""Which sample goes where: exact, the same at any number of workers, resumable."""

from lockstep.data.data_order_check import check_agreement
from lockstep.data.rank_loader import RankLoader, shard_loader
from lockstep.data.ray_dataset import RayBatches, RayDatasetShard
from lockstep.data.shard_batch_size import ShardBatchSize, split_batch_size
from lockstep.data.shard_placement import ShardPlacement, shards_of
from lockstep.data.sharded_loader import BatchParts, LoadedPart, ShardedLoader, Step
from lockstep.data.user_sharded_loader import UserShardedLoader

__all__ = [
    "BatchParts",
    "LoadedPart",
    "RankLoader",
    "RayBatches",
    "RayDatasetShard",
    "ShardBatchSize",
    "ShardPlacement",
    "ShardedLoader",
    "Step",
    "UserShardedLoader",
    "check_agreement",
    "shard_loader",
    "shards_of",
    "split_batch_size",
]
