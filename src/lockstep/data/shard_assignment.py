# SPDX-License-Identifier: Apache-2.0
"""Which shards of every global batch a worker computes, and which samples make a shard.

A worker's shards are contiguous, and exactly one worker computes each shard.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import ConfigurationError


def shards_of(rank: int, world_size: int, num_shards: int) -> range:
    """The shards that `rank` computes; the ranks' numbers of shards differ by at most one."""
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


def shard_bounds(size: int, num_shards: int, shard: int) -> tuple[int, int]:
    """Where `shard`'s part of `size` items begins and ends; the first parts are one larger."""
    base, larger = divmod(size, num_shards)
    start = shard * base + min(shard, larger)
    return start, start + base + (shard < larger)


@dataclass(frozen=True)
class ShardAssignment:
    """The shards that one worker computes.

    Args:
        num_shards: the number of shards of every global batch.
        shards: the worker's shards, contiguous.
        seed: the seed of the run.

    Raises:
        ConfigurationError: `num_shards` is below 1, or `shards` is not a contiguous part of them.
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
