# SPDX-License-Identifier: Apache-2.0
"""`DataParallelMesh`: over which ranks a copy of a model is sharded, and who has the same rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataParallelMesh:
    """The place of a rank among ranks that hold one or several copies of a model in shards (HSDP).

    The first copy is sharded over the first `shard_size` ranks, the second over the next ones: the
    ranks of a copy are neighbours, because they communicate most.

    Args:
        rank: this rank.
        size: of the group.
        dp_shard_size: over how many ranks a copy is sharded; None for all. A group that it does
            not divide (one that a rank was lost from) holds one copy.
    """

    rank: int
    size: int
    dp_shard_size: int | None = None

    @property
    def shard_size(self) -> int:
        """The number of ranks over which a copy is sharded."""
        size = self.dp_shard_size
        return self.size if size is None or self.size % size else size

    @property
    def replicate_size(self) -> int:
        """The number of copies."""
        return self.size // self.shard_size

    @property
    def shard_rank(self) -> int:
        """This rank's place among those of its copy: the rows that it has."""
        return self.rank % self.shard_size

    @property
    def replicate_rank(self) -> int:
        """The number of this rank's copy."""
        return self.rank // self.shard_size

    @property
    def copies(self) -> list[range]:
        """The ranks of each copy."""
        return [range(f, f + self.shard_size) for f in range(0, self.size, self.shard_size)]

    @property
    def shard_ranks(self) -> range:
        """The ranks of this rank's copy."""
        return self.copies[self.replicate_rank]

    @property
    def replicate_ranks(self) -> range:
        """The ranks that have the same rows as this one, each of another copy."""
        return range(self.shard_rank, self.size, self.shard_size)
