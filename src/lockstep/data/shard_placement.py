# SPDX-License-Identifier: Apache-2.0
"""Which shards of every global batch a worker carries.

The shards of a worker are contiguous, and each shard is carried by exactly one worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import ConfigurationError


def shards_of(rank: int, world_size: int, num_shards: int) -> range:
    """The shards that `rank` carries: balanced to within one."""
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


@dataclass(frozen=True)
class ShardPlacement:
    """Which shards a worker carries.

    Args:
        num_shards: into how many parts every global batch is cut.
        shards: this worker's, contiguous.
        seed: the run's.

    Raises:
        ConfigurationError: no shards at all, or shards that do not exist.
    """

    num_shards: int
    shards: range
    seed: int

    def __post_init__(self) -> None:
        inside = self.shards.start >= 0 and self.shards.stop <= self.num_shards
        if self.num_shards < 1 or self.shards.step != 1 or (self.shards and not inside):
            raise ConfigurationError(
                "a worker cannot carry these shards",
                expected=f"a contiguous range within 0 to {self.num_shards}",
                got=f"num_shards={self.num_shards}, shards={self.shards}",
            )
