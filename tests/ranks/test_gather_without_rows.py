# SPDX-License-Identifier: Apache-2.0
"""A gather over a subgroup of which no rank has samples: the others' step is that of one process.

Four ranks, of which two and two gather among themselves.
"""

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep
from harness import assert_same, gradients, reset, ring, rows, run_ranks
from lockstep.operator import Options
from lockstep.sync import replicate
from ranks.contrastive import towers
from ranks.test_gather_borrowed import (
    NUM_SHARDS,
    PIECES,
    Recipe,
    assert_weights,
    on_workers,
    one_process,
    rows_to_columns,
)

SIZE = 4


def in_pairs(loss, pair_rows):
    """A mean over samples, of which each is compared with those of its pair of ranks."""

    def of_whole_batch(a, b, scale):
        parts = zip(a.split(pair_rows), b.split(pair_rows), strict=True)
        return sum(len(x) * loss(x, y, scale) for x, y in parts) / len(a)

    return of_whole_batch


class Pairs(Recipe):
    """Each worker compares its samples with those of one other worker."""

    true_loss = staticmethod(in_pairs(rows_to_columns, 6))
    trained: ClassVar = {}
    joins: ClassVar = []

    def setup(self, config):
        super().setup(config)
        self.pair = self.joins[self.world_rank // 2](self.world_rank % 2)

    def compute_loss(self, batch, batch_info):
        a, b = self.model(*batch)
        mine = lockstep.rank_slice(a, group=self.pair)
        logits = self.model.scale * a @ lockstep.gather(b, group=self.pair).T
        return functional.cross_entropy(logits, torch.arange(mine.start, mine.stop))


def test_workers_of_a_pair_without_samples_compute_on_borrowed_ones():
    """The last batch has one sample; the second pair sees the rows of the batch that it borrows."""
    Pairs.joins[:] = ring(2), ring(2)
    model, _ = one_process(Pairs.true_loss, [torch.tensor(list(piece)) for piece in PIECES])
    assert NUM_SHARDS == SIZE
    on_workers(Pairs, SIZE, Options())
    assert_weights(Pairs, SIZE, model)


@pytest.mark.parametrize("backward", ["adjoint", "replicated"])
def test_ranks_of_a_pair_without_rows_gather_none(backward):
    x = rows(2, 5, seed=3)
    alone, scale = reset(nn.Linear(5, 3).double(), seed=1), towers().scale.detach()
    (alone(x).square().sum(1) * scale).mean().backward()
    joins = ring(2), ring(2)

    def body(group):
        model = reset(nn.Linear(5, 3).double(), seed=1)
        pair = joins[group.rank // 2](group.rank % 2)
        sync = replicate(model, group=group)
        mine = x[group.rank : group.rank + 1]
        everyone = lockstep.gather(model(mine), group=pair, backward=backward)
        place = lockstep.rank_slice(mine, group=pair)
        num_rows = len(everyone)
        loss = (everyone.square().sum(1) * scale).sum() / max(1, num_rows)
        sync.backward(loss, weight=len(mine))
        sync.detach()
        pair.close()
        return num_rows, place, gradients(model)

    results = run_ranks(SIZE, body)
    assert [each[0] for each in results] == [2, 2, 0, 0]
    assert [each[1] for each in results] == [slice(0, 1), slice(1, 2), slice(0, 0), slice(0, 0)]
    for each in results:
        assert_same(each[2], gradients(alone))
