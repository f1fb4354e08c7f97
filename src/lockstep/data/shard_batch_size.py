# SPDX-License-Identifier: Apache-2.0
"""The batch size of one shard: an ``int`` that carries the global batch size with it.

``config[BATCH_SIZE]`` is the global batch size. A user's ``setup`` needs an ``int`` to build a
loader with, but a shard's batch size alone cannot be multiplied back: 21 over 2 shards is 11 and
10. So the ``int`` carries the global batch size as its attribute `whole`, torch's ``DataLoader``
keeps the object that it was given, and `ShardedLoader` reads `whole` from the loader. No size is
rounded, and the user's config is not changed.
"""

from __future__ import annotations

from typing import Any

from lockstep.data.shard_assignment import shard_bounds
from lockstep.errors import ConfigurationError


class ShardBatchSize(int):
    """How many samples of a global batch one shard takes: an ``int``, at least 1.

    Multiplying and floor-dividing by an integer scale `whole` as well. Any other arithmetic
    gives a plain ``int``, which a loader takes as its own per-shard batch size.

    Args:
        share: this shard's samples of a full global batch. Where the shard has none, the ``int``
            is 1, because torch refuses a batch size of 0; `whole` decides what the shard reads.
        whole: the global batch size, in samples.
    """

    # An ordinary attribute: subclasses of `int` cannot have non-empty slots.
    whole: int

    def __new__(cls, share: int, whole: int) -> ShardBatchSize:
        self = super().__new__(cls, max(1, share))
        self.whole = whole
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.whole)

    def __mul__(self, factor: int) -> int:
        product = super().__mul__(factor)
        if not _is_plain_int(factor) or factor < 1:
            return product
        return type(self)(product, self.whole * factor)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: int) -> int:
        quotient = super().__floordiv__(divisor)
        if not _is_plain_int(divisor) or not 1 <= divisor <= self.whole:
            return quotient
        return type(self)(quotient, self.whole // divisor)


def _is_plain_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, (bool, ShardBatchSize))


def split_batch_size(whole: int, num_shards: int, shard: int) -> ShardBatchSize:
    """The batch size of `shard` (of `num_shards`) where the global batch has `whole` samples.

    Raises:
        ConfigurationError: `whole` is not an integer of at least 1.
    """
    if isinstance(whole, bool) or not isinstance(whole, int) or whole < 1:
        raise ConfigurationError(
            "config[BATCH_SIZE] cannot be a global batch size",
            expected="an integer of at least 1: the samples of one step over all shards",
            got=repr(whole),
            fix=f"config={{BATCH_SIZE: {num_shards * 32}}} gives {num_shards} shard(s) 32 each",
        )
    # A config that was passed on holds a `ShardBatchSize`: its `whole` is the global batch size.
    global_batch_size = getattr(whole, "whole", int(whole))
    start, stop = shard_bounds(global_batch_size, num_shards, shard)
    return ShardBatchSize(stop - start, global_batch_size)
