# SPDX-License-Identifier: Apache-2.0
"""Shares the samples of a loader out over shards and workers.

In an epoch every sample is read once; the batches do not depend on the number of workers; and the
position in the data can be saved and loaded.
"""

from lockstep.data.data_order_check import check_same_plan
from lockstep.data.ray_dataset import RayBatches, RayDatasetShard
from lockstep.data.shard_assignment import ShardAssignment, shards_of
from lockstep.data.shard_batch_size import ShardBatchSize, split_batch_size
from lockstep.data.shard_loader import RankLoader, shard_loader
from lockstep.data.sharded_loader import BatchParts, LoadedPart, ShardedLoader, Step
from lockstep.data.user_sharded_loader import UserShardedLoader

__all__ = [
    "BatchParts",
    "LoadedPart",
    "RankLoader",
    "RayBatches",
    "RayDatasetShard",
    "ShardAssignment",
    "ShardBatchSize",
    "ShardedLoader",
    "Step",
    "UserShardedLoader",
    "check_same_plan",
    "shard_loader",
    "shards_of",
    "split_batch_size",
]
