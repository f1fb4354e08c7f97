# SPDX-License-Identifier: Apache-2.0
"""Which sample goes where: exact, the same at any number of workers, resumable."""

from lockstep.data.agreement import check_agreement
from lockstep.data.batch_size import ShardBatchSize, split_batch_size
from lockstep.data.sharded import Part, Placement, ShardedLoader, Step

__all__ = [
    "Part",
    "Placement",
    "ShardBatchSize",
    "ShardedLoader",
    "Step",
    "check_agreement",
    "split_batch_size",
]
