# SPDX-License-Identifier: Apache-2.0
"""Buffers that a program adds to a synchronised model: the next round compares their values."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from harness import assert_equal_on_all_ranks, outcomes, reset, rows, run_ranks
from lockstep.errors import GradientNotReducedError
from lockstep.sync import GradientSync, local

X = rows(12, 4, seed=1)


class Centred(nn.Module):
    """Its first forward registers a buffer: the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.mean(0))
        return self.layer(x - self.mean)


def mask(model, rank):
    kept = (rows(3, 4, seed=rank) > 0).double()
    prune.custom_from_mask(model[0], "weight", kept)


def buffer_in_a_new_layer(model, rank):
    layer = nn.Identity()
    layer.register_buffer("offset", torch.full((3,), float(rank)))
    model.append(layer)


def batch_norm(model, rank):
    model.append(nn.BatchNorm1d(3, affine=False).double())


def scale(model, rank):
    model[0].register_buffer("scale", torch.full((), 1.0 + rank))


CHANGES = [mask, buffer_in_a_new_layer, batch_norm, scale]


def train(model, group, change, *, steps=3):
    sync = GradientSync([model], group, owns_group=True)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            if step == 1 and change is not None:
                change(model, group.rank)
            optimizer.zero_grad()
            model(X[group.rank :: 2]).square().mean().backward()
            optimizer.step()
    finally:
        sync.detach()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def net():
    return reset(nn.Sequential(nn.Linear(4, 3)), seed=3)


@pytest.mark.parametrize("change", CHANGES)
def test_values_of_a_ranks_own_are_refused_on_every_rank(change):
    for result in outcomes(2, lambda group: train(net(), group, change)):
        assert isinstance(result, GradientNotReducedError)
        assert "buffers that ranks have registered" in str(result)


def test_what_a_forward_computes_from_its_rows_is_refused():
    def body(group):
        return train(reset(Centred(), seed=3), group, None)

    assert [type(result) for result in outcomes(2, body)] == [GradientNotReducedError] * 2


def test_equal_values_are_not():
    def body(group):
        return train(net(), group, lambda model, _: prune.l1_unstructured(model[0], "weight", 0.5))

    assert_equal_on_all_ranks(run_ranks(2, body))


def test_neither_what_is_local_nor_what_is_no_state():
    def change(model, rank):
        model[0].register_buffer("own", local(torch.full((), float(rank))))
        model[0].register_buffer("cache", torch.full((), float(rank)), persistent=False)

    run_ranks(2, lambda group: train(net(), group, change))


def test_a_name_that_was_there_is_no_new_buffer():
    def body(group):
        model = reset(Centred(), seed=3)
        model.register_buffer("mean", torch.zeros(4))
        model.register_buffer("spread", None)
        train(model, group, lambda model, rank: model.register_buffer("spread", X[rank]))
        return {"spread": model.spread}

    assert_equal_on_all_ranks(run_ranks(2, body))
