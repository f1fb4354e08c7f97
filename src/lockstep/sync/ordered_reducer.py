# SPDX-License-Identifier: Apache-2.0
"""A round whose sum is added in the order of the shards: the same bits at any worker count.

Every shard's gradient is taken out of ``parameter.grad`` as soon as its backward has ended
(`take_shard`), because adding the next one to it would add in the order in which this worker
happens to carry them. Gradients of several batches of one accumulation window add up shard by
shard first. Nothing overlaps backward: what a shard contributes is known when it is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lockstep.group import Pending
from lockstep.sync.reducer import Reducer
from lockstep.sync.shard_order import Node, ShardOrder, fold, ordered_sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.group import Group
    from lockstep.sync.buckets import Bucket, Slot
    from lockstep.sync.reducer import Contribution


class OrderedReducer(Reducer):
    """See `Reducer`; with `order`, the sum over shards is added in a fixed order."""

    def __init__(
        self,
        slots: Sequence[Slot],
        group: Group,
        cap_bytes: int,
        order: ShardOrder,
        signature: int = 0,
        *,
        divides: bool = True,
    ) -> None:
        super().__init__(slots, group, cap_bytes, self._sum_in_order, signature, divides=divides)
        self._order = order
        self._forget_shards()

    @property
    def can_overlap(self) -> bool:
        return False

    def _forget_shards(self) -> None:
        self._leaves: dict[Bucket, dict[Node, torch.Tensor]] = {b: {} for b in self.layout.buckets}
        self._used = {bucket: [False] * len(bucket.slots) for bucket in self.layout.buckets}
        self._weights: dict[Node, torch.Tensor] = {}

    def take_shard(self, shard: int, weight: float) -> None:
        """Move what one shard's backward left in ``parameter.grad`` to where it is added up.

        Args:
            weight: what its loss counted for, in units.
        """
        node = (shard, shard + 1)
        with torch.no_grad():
            for bucket in self.layout.buckets:
                if not self._packs_densely(bucket):
                    continue
                leaves, used = self._leaves[bucket], self._used[bucket]
                if node in leaves:
                    leaves[node].add_(bucket.payload)
                else:
                    leaves[node] = bucket.payload.clone()
                self._used[bucket] = [a or b for a, b in zip(used, bucket.used, strict=True)]
            # In the tail's dtype and on its device, because it is added up like the gradients.
            added = torch.full_like(self.layout.tail[:1], weight)
            self._weights[node] = self._weights.get(node, torch.zeros_like(added)) + added
        for slot in self.layout.slots:
            slot.param.grad = None

    def start(self, contribution: Contribution, step: int = 0) -> None:
        faults = self.contribution.faults
        super().start(contribution, step)
        contribution.faults.extend(faults)  # of the shards, found when they were taken

    def _pack(self, bucket: Bucket) -> None:
        bucket.used = self._used[bucket]
        for slot, used in zip(bucket.slots, bucket.used, strict=True):
            if used:
                slot.param.grad = slot.view

    def _sum_in_order(self, group: Group, bucket: Bucket) -> Pending:
        if bucket.payload.numel():
            bucket.payload.copy_(self._summed(group, self._leaves[bucket], bucket.payload))
        if bucket is self.layout.buckets[-1]:
            group.all_reduce(bucket.tail).wait()
            weight = self._summed(group, self._weights, bucket.tail[:1])
            self.layout.sums_on_device[:1].copy_(weight)
        return Pending(None, "", "")

    def _summed(
        self, group: Group, leaves: dict[Node, torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        own = [(shard, shard + 1) for shard in self._order.shards]
        every = {node: leaves[node] if node in leaves else torch.zeros_like(like) for node in own}
        nodes = self._order.subtrees(self._order.rank)
        return ordered_sum(group, self._order, {node: fold(node, every) for node in nodes})

    def abandon(self) -> None:
        super().abandon()
        self._forget_shards()
