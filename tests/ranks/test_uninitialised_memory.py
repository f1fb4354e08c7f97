# SPDX-License-Identifier: Apache-2.0
"""Buckets are made of memory that nobody has written; none of it may reach a gradient."""

import pytest
import torch
from torch import nn

from harness import assert_same, gradients, reset, rows, run_ranks
from lockstep.sync import GradientSync, ShardOrder

X = rows(6, 4, seed=1)


@pytest.fixture
def unwritten_is_nan():
    """torch fills what it hands out with NaN, so that reading it shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def build():
    """Three layers: both ranks use the first, rank 0 alone the second, nobody the third."""
    return reset(nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)]), seed=3)


def loss_of(layers, rank):
    hidden = layers[0](X[2 * rank : 2 * rank + 2])
    return (layers[1](hidden) if rank == 0 else hidden).square().mean()


@pytest.mark.parametrize("cap_mb", [25, 1e-4])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("silent", [None, 0, 2])
def test_what_some_or_all_ranks_do_not_use(unwritten_is_nan, silent, in_order, cap_mb):
    """`silent`: a rank that brings nothing."""
    models = [build() for _ in range(3)]

    def body(group):
        model = models[group.rank]
        order = ShardOrder(3, [range(rank, rank + 1) for rank in range(3)], group.rank)
        sync = GradientSync([model], group, bucket_cap_mb=cap_mb, order=order if in_order else None)
        assert sync._rounds.transport.reducer.layout.buckets[0].payload.isnan().all()
        for _ in range(2):
            model.zero_grad()
            if group.rank == silent:
                sync.reduce_pending()
            elif in_order:
                with sync.last_shard(group.rank):
                    sync.backward(loss_of(model, group.rank), weight=2)
            else:
                sync.backward(loss_of(model, group.rank), weight=2)
        sync.detach()
        return gradients(model)

    true = build()
    active = [rank for rank in range(3) if rank != silent]
    for rank in active:
        (loss_of(true, rank) / len(active)).backward()
    for got in run_ranks(3, body):
        assert_same(got, gradients(true))
