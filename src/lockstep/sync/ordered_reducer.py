# SPDX-License-Identifier: Apache-2.0
"""`OrderedReducer`: adds in the order of the shards, for the same bits at any number of workers.

Every shard's gradient but the last is taken out of ``parameter.grad`` as soon as its backward has
ended (`pack_shard`), and waits for the others (`add_shard`): autograd would add the next shard's
gradient to it, in the order in which this worker happens to carry the shards. The last shard's
gradient is added to the others bucket by bucket, as the buckets leave. Gradients of several batches
of one accumulation window add up shard by shard first.

Two workers hold half of the shards each: one all-reduce adds their parts, and overlaps backward as
it does without an order. The parts of more workers are added when backward is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.pending_collective import Pending
from lockstep.sync.buckets import length_of
from lockstep.sync.reducer import Reducer
from lockstep.sync.shard_tree_sum import Node, ShardOrder, fold, is_one_addition, ordered_sum
from lockstep.tensor_copies import as_bytes
from lockstep.weight_hashes import sum_of_mixed_lanes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.group import Group
    from lockstep.sync.buckets import Bucket, Slot
    from lockstep.sync.round_contribution import Contribution


@dataclass(frozen=True)
class ShardGradient:
    """The gradient of one shard's backwards, packed like the buckets that it goes into.

    Attributes:
        payloads: for each bucket its part; None where a gradient does not fit.
        used: for each bucket, which of its parameters have a gradient.
        weight: of the shard's loss, in units.
    """

    payloads: Sequence[torch.Tensor | None]
    used: Sequence[Sequence[bool]]
    weight: float


class OrderedReducer(Reducer):
    """See `Reducer`; with `order`, the sum over shards is added in a fixed order."""

    def __init__(
        self,
        slots: Sequence[Slot],
        group: Group,
        cap_bytes: int,
        signature: int = 0,
        *,
        order: ShardOrder,
        divides: bool = True,
    ) -> None:
        super().__init__(slots, group, cap_bytes, signature, divides=divides)
        # With an order of shards no factor may depend on the number of ranks.
        self._share = 1.0 / order.num_shards if divides else 1.0
        self._order = order
        self._adds_once = {
            bucket: is_one_addition(group, order, bucket.flat) for bucket in self.layout.buckets
        }
        self._forget_shards()

    @property
    def can_overlap(self) -> bool:
        return super().can_overlap and all(self._adds_once.values())

    def _forget_shards(self) -> None:
        self._leaves: dict[Bucket, dict[Node, torch.Tensor]] = {b: {} for b in self.layout.buckets}
        self._used: dict[Bucket, list[bool]] = {}
        self._weights: dict[Node, torch.Tensor] = {}
        self._last: Node | None = None

    def pack_shard(self, weight: float) -> ShardGradient:
        """Move one shard's gradient out of ``parameter.grad``.

        Args:
            weight: of the shard's loss, in units.
        """
        payloads: list[torch.Tensor | None] = []
        used: list[Sequence[bool]] = []
        with torch.no_grad():
            for bucket in self.layout.buckets:
                fits = self._pack_or_note_fault(bucket, self._share)
                payloads.append(bucket.payload.clone() if fits else None)
                used.append(bucket.used)
        for slot in self.layout.slots:
            slot.param.grad = None
        return ShardGradient(payloads, used, weight)

    def add_shard(self, shard: int, gradient: ShardGradient) -> None:
        """Add the gradient of `shard` to those that the shard had earlier in the window."""
        node = (shard, shard + 1)
        with torch.no_grad():
            for bucket, payload, used in zip(
                self.layout.buckets, gradient.payloads, gradient.used, strict=True
            ):
                if payload is not None:
                    own = payload.to(bucket.payload.device)  # another worker's comes from the CPU
                    self._leaves[bucket][node] = self._with_earlier(bucket, node, own)
                    self._used[bucket] = self._with_used(bucket, used)
            self._weigh(node, gradient.weight)

    def bits_of(self, gradient: ShardGradient) -> dict[str, int]:
        """For each parameter, by name, a hash of the bits of its gradient."""
        bits: dict[str, int] = {}
        for bucket, payload in zip(self.layout.buckets, gradient.payloads, strict=True):
            if payload is None or not bucket.slots:
                continue
            parts = payload.split([length_of(slot.param) for slot in bucket.slots])
            sums = torch.stack([sum_of_mixed_lanes(as_bytes(part)) for part in parts])
            bits.update(zip((slot.name for slot in bucket.slots), sums.tolist(), strict=True))
        return bits

    def set_last_shard(self, shard: int, weight: float) -> None:
        """Let the round that has begun reduce the gradient of `shard` as it arrives.

        `pack_shard` does not take that gradient: its buckets may leave while its backward runs.

        Args:
            weight: as of `pack_shard`.
        """
        self._last = (shard, shard + 1)
        with torch.no_grad():
            self._weigh(self._last, weight)

    def _weigh(self, node: Node, weight: float) -> None:
        # In the tail's dtype and on its device, because it is added up like the gradients.
        added = torch.full_like(self.layout.tail[:1], weight * self._share)
        self._weights[node] = self._weights[node] + added if node in self._weights else added

    def _with_earlier(self, bucket: Bucket, node: Node, payload: torch.Tensor) -> torch.Tensor:
        """`payload` and the gradients that the shard had earlier in the window, added in place."""
        earlier = self._leaves[bucket].get(node)
        return payload if earlier is None else payload.add_(earlier)

    def _with_used(self, bucket: Bucket, used: Sequence[bool]) -> list[bool]:
        """What this rank's shards have used in the window, `used` included."""
        earlier = self._used.get(bucket, used)
        return [a or b for a, b in zip(earlier, used, strict=True)]

    def start(self, contribution: Contribution, step: int = 0) -> None:
        faults = self.contribution.faults
        super().start(contribution, step)
        contribution.faults.extend(faults)  # of the shards, found when they were packed

    def _pack(self, bucket: Bucket) -> None:
        if self._last is not None:
            if self._pack_or_note_fault(bucket, self._share):
                payload = self._with_earlier(bucket, self._last, bucket.payload)
                self._leaves[bucket][self._last] = payload
                bucket.used = self._with_used(bucket, bucket.used)
        else:
            bucket.used = self._used.get(bucket) or [False] * len(bucket.slots)
        if bucket in self._used:
            for slot, used in zip(bucket.slots, bucket.used, strict=True):
                if used:
                    slot.param.grad = slot.view

    def _sum(self, group: Group, bucket: Bucket) -> Pending:
        is_last = bucket is self.layout.buckets[-1]
        weight = self.layout.sums_on_device[:1]
        nodes = self._order.subtrees(self._order.rank)
        if group.is_alone or self._adds_once[bucket]:
            (node,) = nodes
            self._fold_into(bucket.payload, node, self._leaves[bucket])
            if is_last:
                self._fold_into(weight, node, self._weights)
            return group.all_reduce(bucket.flat)
        if bucket.payload.numel():
            bucket.payload.copy_(
                self._sum_over_shards(group, nodes, self._leaves[bucket], bucket.payload)
            )
        if is_last:
            group.all_reduce(bucket.tail).wait()
            weight.copy_(self._sum_over_shards(group, nodes, self._weights, weight))
        return Pending()

    def _fold_into(self, place: torch.Tensor, node: Node, leaves: dict[Node, torch.Tensor]) -> None:
        total = fold(node, self._leaves_or_zeros(leaves, place), place)
        if total is not place:
            place.copy_(total)

    def _sum_over_shards(
        self, group: Group, nodes: list[Node], leaves: dict[Node, torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        every = self._leaves_or_zeros(leaves, like)
        return ordered_sum(group, self._order, {node: fold(node, every) for node in nodes})

    def _leaves_or_zeros(
        self, leaves: dict[Node, torch.Tensor], like: torch.Tensor
    ) -> dict[Node, torch.Tensor]:
        """The sum of each of this rank's shards, zero for a shard without gradients."""
        own = [(shard, shard + 1) for shard in self._order.shards]
        return {node: leaves[node] if node in leaves else torch.zeros_like(like) for node in own}

    def abandon(self) -> None:
        super().abandon()
        self._forget_shards()
