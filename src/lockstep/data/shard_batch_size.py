# SPDX-License-Identifier: Apache-2.0
"""A shard's share of the global batch size: an ``int`` that remembers the global batch size.

``config[BATCH_SIZE]`` is the global batch. A user's ``setup`` wants an ``int`` to build a loader
with, but a share alone cannot be multiplied back: 21 over 2 shards is 11 and 10. So the share
carries the whole, torch's ``DataLoader`` keeps the object that it was given, and `ShardedLoader`
reads the whole from there. Nothing is rounded, nothing is written back.
"""

from __future__ import annotations

from typing import Any

from lockstep.errors import ConfigurationError


class ShardBatchSize(int):
    """How many samples of a global batch one shard takes: an ``int``, at least 1.

    Multiplying and floor-dividing by an integer scale the whole as well. Any other arithmetic
    gives a plain ``int``, which a loader takes as its own per-shard batch size.

    Args:
        share: this shard's samples of a full global batch (1 where it has none, because
            torch refuses a batch size of 0; what is read is decided by `whole`).
        whole: the global batch size, in samples.
    """

    # `int` subclasses cannot have non-empty slots, so this is an ordinary attribute.
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


def share_bounds(size: int, num_shards: int, shard: int) -> tuple[int, int]:
    """Where `shard`'s part of `size` things begins and ends; the first parts are one larger."""
    base, larger = divmod(size, num_shards)
    start = shard * base + min(shard, larger)
    return start, start + base + (shard < larger)


def split_batch_size(whole: int, num_shards: int, shard: int) -> ShardBatchSize:
    """The share of a global batch of `whole` samples that `shard` of `num_shards` takes.

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
    # A whole that already remembers a whole (a config passed on) is the global batch itself.
    whole = getattr(whole, "whole", int(whole))
    start, stop = share_bounds(whole, num_shards, shard)
    return ShardBatchSize(stop - start, whole)
