# SPDX-License-Identifier: Apache-2.0
"""A sum over shards has the same bits whoever carries which shard."""

import pytest
import torch

from harness import run_ranks
from lockstep.data import shards_of
from lockstep.sync.shard_tree_sum import ShardOrder, fold, ordered_sum


def leaves(num_shards: int, length: int) -> list[torch.Tensor]:
    """Of very different sizes, so that another order of addition gives other bits."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(length, generator=generator) * 10.0 ** (shard % 5 - 2)
        for shard in range(num_shards)
    ]


def summed(num_shards: int, size: int, length: int) -> list[torch.Tensor]:
    shards = leaves(num_shards, length)
    by_rank = [shards_of(rank, size, num_shards) for rank in range(size)]

    def body(group):
        order = ShardOrder(num_shards, by_rank, group.rank)
        every = {(shard, shard + 1): shards[shard] for shard in order.shards}
        partials = {node: fold(node, every) for node in order.subtrees(group.rank)}
        return ordered_sum(group, order, partials)

    return run_ranks(size, body)


# 70 000 floats of several partial sums are above the size that is gathered whole.
@pytest.mark.parametrize("length", [1, 37, 70_001])
@pytest.mark.parametrize("num_shards", [4, 5, 7])
def test_the_bits_do_not_depend_on_the_number_of_ranks(num_shards, length):
    (alone,) = summed(num_shards, 1, length)
    for size in (2, 3, 4):
        for found in summed(num_shards, size, length):
            assert torch.equal(found, alone)


def test_another_order_gives_other_bits():
    """The test above would hold for any order if addition were associative here."""
    shards = leaves(4, 1000)
    (in_order,) = summed(4, 1, 1000)
    assert not torch.equal(((shards[0] + shards[1]) + shards[2]) + shards[3], in_order)


def test_contiguous_shards_travel_as_subtrees():
    order = ShardOrder(4, [range(2), range(2, 4)], 0)
    assert order.subtrees(0) == [(0, 2)]
    assert order.subtrees(1) == [(2, 4)]
    uneven = ShardOrder(4, [range(1), range(1, 3), range(3, 4)], 0)
    assert uneven.subtrees(1) == [(1, 2), (2, 3)]
