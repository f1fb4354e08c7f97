# SPDX-License-Identifier: Apache-2.0
"""A sum over shards whose bits do not depend on which rank computed which shard.

Addition of floating-point numbers is not associative, so the order is fixed once and for all:
a binary tree over the shards 0 to S - 1, split in the middle. A rank carries contiguous
shards, so whole subtrees are its own: it sends one partial sum for each of them, not a copy
for each shard. A rank that carries all shards adds up in the same order and sends nothing.

Large sums travel as a ring all-reduce would: every rank receives all partial sums of its
own slice (all-to-all), adds them in the order of the tree, and the slices are gathered: the
same bytes as a ring when every rank has one partial sum. Small ones are gathered whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.group import Group

Node = tuple[int, int]
"""A subtree: the shards from the first to before the second."""

_GATHERED_WHOLE_BYTES: Final = 1 << 18
"""Below this a second message costs more than the bytes that it saves."""


@dataclass(frozen=True)
class ShardOrder:
    """The shards of every rank, and the order in which their gradients are added.

    Attributes:
        by_rank: every rank's contiguous shards.
        rank: this one.
    """

    num_shards: int
    by_rank: Sequence[range]
    rank: int

    @property
    def shards(self) -> range:
        return self.by_rank[self.rank]

    def subtrees(self, rank: int) -> list[Node]:
        """The largest subtrees whose shards all belong to `rank`, in order."""
        return _subtrees_within((0, self.num_shards), self.by_rank[rank])


def _subtrees_within(node: Node, shards: range) -> list[Node]:
    low, high = node
    if shards.start <= low and high <= shards.stop:
        return [node]
    if high <= shards.start or shards.stop <= low or high - low == 1:
        return []
    middle = (low + high) // 2
    return _subtrees_within((low, middle), shards) + _subtrees_within((middle, high), shards)


def fold(
    node: Node, sums: Mapping[Node, torch.Tensor], out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum over `node`, from sums over subtrees that together cover it.

    Args:
        out: where an addition may put it; may be one of `sums`.
    """
    found = sums.get(node)
    if found is not None:
        return found
    low, high = node
    middle = (low + high) // 2
    return torch.add(fold((low, middle), sums), fold((middle, high), sums), out=out)


def ordered_sum(
    group: Group, order: ShardOrder, partials: Mapping[Node, torch.Tensor]
) -> torch.Tensor:
    """The sum over all shards, added in the order of the tree.

    Args:
        partials: this rank's sum over each of its `subtrees`; flat, of one length.

    Returns:
        Flat, of that length; the same bits on every rank and for every number of ranks.

    Gradient:
        None: runs on gradients, without recording.

    Collective:
        Every rank of `group`. Blocks. One all-gather of small sums; else an all-to-all and an
        all-gather.
    """
    root = (0, order.num_shards)
    if group.size == 1:
        return fold(root, partials)
    own = torch.stack([partials[node] for node in order.subtrees(order.rank)])
    most = max(len(order.subtrees(rank)) for rank in range(group.size))
    if own[0].numel() * own.element_size() * most * group.size <= _GATHERED_WHOLE_BYTES:
        return fold(root, _gather_whole(group, order, own, most))
    return _by_slices(group, order, own, root)


def is_one_addition(group: Group, order: ShardOrder, like: torch.Tensor) -> bool:
    """Whether two ranks hold one child of the root each: a + b is b + a, also in the last bit.

    An all-reduce of the two then has the bits of the tree. That holds for the additions of IEEE 754
    in full precision, as a CPU does them. How halves are rounded, and what other backends do with
    the smallest numbers, differs from torch's own sums.
    """
    if group.size != 2 or any(len(order.subtrees(rank)) != 1 for rank in range(2)):
        return False
    return like.dtype in (torch.float32, torch.float64) and like.device.type == "cpu"


def _gather_whole(
    group: Group, order: ShardOrder, own: torch.Tensor, most: int
) -> dict[Node, torch.Tensor]:
    padded = own.new_zeros(most, own.shape[1])
    padded[: len(own)] = own
    gathered = group.all_gather(padded)
    return {
        node: rows[position]
        for rank, rows in enumerate(gathered)
        for position, node in enumerate(order.subtrees(rank))
    }


def _by_slices(group: Group, order: ShardOrder, own: torch.Tensor, root: Node) -> torch.Tensor:
    length = own.shape[1]
    size = -(-length // group.size)
    padded = torch.nn.functional.pad(own, (0, size * group.size - length))
    # (partial sums, ranks, slice) -> (ranks, partial sums, slice): by receiving rank.
    sent = padded.view(len(own), group.size, size).transpose(0, 1).contiguous()
    counts = [len(order.subtrees(rank)) for rank in range(group.size)]
    received = own.new_empty(sum(counts), size)
    group.all_to_all(received, sent.view(-1, size), counts, [len(own)] * group.size)
    nodes = [node for rank in range(group.size) for node in order.subtrees(rank)]
    mine = fold(root, dict(zip(nodes, received, strict=True)))
    return torch.cat(group.all_gather(mine))[:length]
