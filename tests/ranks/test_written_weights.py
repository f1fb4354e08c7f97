# SPDX-License-Identifier: Apache-2.0
"""A rank that has run no forward of a batch gets the weights that the others' forwards write."""

import pytest
import torch
from torch import nn

from harness import outcomes, reset, run_ranks
from lockstep.errors import PeerLostError
from lockstep.sync import local, replicate


def replicas(size):
    return [reset(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), seed=3) for _ in range(size)]


@pytest.mark.parametrize("idle", [[0], [2], [0, 1]])
def test_they_come_from_the_first_rank_that_has_run_one(idle):
    models = replicas(3)

    def body(group):
        model = models[group.rank]
        sync = replicate(model, group=group)
        has_written, weight = group.rank not in idle, model[0].weight
        if has_written:
            with torch.no_grad():
                weight.copy_(torch.full_like(weight, group.rank + 1.0))
        version = weight._version
        written = [weight] if has_written else []
        found = sync.broadcast_weights(written, has_written=has_written)
        assert [each is weight for each in found] == [True]
        assert weight._version > version
        sync.detach()
        return weight.detach().clone()

    source = min(rank for rank in range(3) if rank not in idle)
    expected = torch.full((3, 4), source + 1.0, dtype=torch.float64)
    assert all(torch.equal(found, expected) for found in run_ranks(3, body))


def test_what_is_a_ranks_own_stays():
    models = replicas(2)

    def body(group):
        model = models[group.rank]
        bias = local(model[1].bias)
        sync = replicate(model, group=group)
        with torch.no_grad():
            bias.fill_(float(group.rank))
        assert sync.broadcast_weights([bias], has_written=group.rank == 0) == []
        sync.detach()
        return bias.tolist()

    assert run_ranks(2, body) == [[0.0, 0.0], [1.0, 1.0]]


def test_a_rank_that_does_not_come_is_missed():
    models = replicas(2)

    def body(group):
        sync = replicate(models[group.rank], group=group)
        try:
            if group.rank == 0:
                sync.broadcast_weights([], has_written=True)
        finally:
            sync.detach()

    assert isinstance(outcomes(2, body)[0], PeerLostError)
