# SPDX-License-Identifier: Apache-2.0
"""Tables that have grown on some ranks are rank 0's when a group forms anew."""

import pytest
import torch
from torch import nn

from harness import reset, run_ranks
from lockstep import local
from lockstep.sync import GradientSync, agree_on_shapes


class Positions(nn.Module):
    """Two layers share a table, which their forwards replace by a longer one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("own", local(torch.zeros(1)))
        self.register_buffer("same", torch.ones(2))
        self.grow(4)

    def grow(self, length):
        table = torch.arange(float(length))
        for layer in (self.first, self.second):
            layer.register_buffer("table", table, persistent=False)


@pytest.mark.parametrize("lengths", [(4, 6), (6, 4), (4, 4)])
def test_they_are_those_of_rank_0_and_shared_as_before(lengths):
    models = [reset(Positions(), seed=1) for _ in lengths]
    for rank, (model, length) in enumerate(zip(models, lengths, strict=True)):
        model.grow(length)
        model.own = local(torch.full((1 + rank,), 5.0 + rank))
        model.same.fill_(rank)

    def body(group):
        model = models[group.rank]
        agree_on_shapes(group, [model])
        GradientSync([model], group, broadcast=False).detach()
        return model.first.table, model.second.table, model.own, model.same

    for rank, (first, second, own, same) in enumerate(run_ranks(2, body)):
        assert first.tolist() == [float(place) for place in range(lengths[0])]
        assert second is first
        assert own.tolist() == [5.0 + rank] * (1 + rank)
        assert same.tolist() == [rank, rank], "of one shape: the next round's broadcast sees to it"
