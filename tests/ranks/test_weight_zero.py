# SPDX-License-Identifier: Apache-2.0
"""What weighs nothing: own rows leave gradients of zero, borrowed rows leave nothing at all."""

import pytest
import torch
from torch import nn

from harness import gradients
from lockstep.sync import SingleProcess
from ranks.programs import X
from ranks.table import BORROWED, check, on_threads
from ranks.test_replicate_exact import weights
from ranks.ways import assert_exact, built, every_way, momentum, on_ranks

SYNCS = ("replicate", "ddp", "parameter_server", "data_parallel")
UNUSED = {"find_unused_parameters": True}
FIRST, REST = slice(0, 8), slice(8, 12)


class TwoLayers(nn.Module):
    """Weightless rows alone go through the second layer."""

    def __init__(self):
        super().__init__()
        self.common, self.rare, self.never = (nn.Linear(4, 3) for _ in range(3))

    def forward(self, x, rare):
        return self.rare(self.common(x)[:, [0, 1, 2, 0]]) if rare else self.common(x)


def loss_of(model, part, *, rare):
    # NaN, as a mean over no tokens is: nothing of it may come through.
    return model(X[part], rare).square().mean() * (torch.nan if rare else 1)


def oracle(*, rare_is_used):
    """Weight decay and momentum move what has a gradient of zero."""
    true, seen = built(TwoLayers), []
    optimizer = momentum(true)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(true, FIRST, rare=False).backward()
        if rare_is_used:
            for param in true.rare.parameters():
                param.grad = torch.zeros_like(param)
        seen.append(gradients(true))
        optimizer.step()
    return [*seen, weights([true])]


def trained(rank, backwards):
    seen = []
    for _ in range(3):
        rank.optimizer.zero_grad()
        backwards()
        seen.append(gradients(rank.plain))
        rank.optimizer.step()
    return [*seen, weights([rank.plain])]


def driven(rank, part, weight, *, rare):
    rank.sync.backward(loss_of(rank.model, part, rare=rare), weight=weight)


@every_way
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_own_rows_of_another_worker(way, cap_mb):
    def body(rank):
        if rank.number == 0:
            return trained(rank, lambda: driven(rank, FIRST, 8, rare=False))
        return trained(rank, lambda: driven(rank, REST, 0, rare=True))

    results = on_ranks(way, body, build=TwoLayers, bucket_cap_mb=cap_mb, ddp_args=UNUSED)
    assert_exact(results, oracle(rare_is_used=True))


@every_way
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("weightless_last", [True, False])
def test_own_rows_of_another_shard(way, size, weightless_last):
    def backwards(rank):
        with rank.sync.no_sync():
            driven(rank, *((FIRST, 8) if weightless_last else (REST, 0)), rare=not weightless_last)
        driven(rank, *((REST, 0) if weightless_last else (FIRST, 8)), rare=weightless_last)

    def body(rank):
        return trained(rank, lambda: backwards(rank))

    results = on_ranks(way, body, size=size, build=TwoLayers, ddp_args=UNUSED)
    assert_exact(results, oracle(rare_is_used=True))


@pytest.mark.parametrize("weightless_last", [True, False])
def test_own_rows_without_peers(weightless_last):
    model = built(TwoLayers)
    sync, optimizer = SingleProcess([model], averages=True), momentum(model)
    parts = [(FIRST, 8, False), (REST, 0, True)]
    (part, weight, rare), last = parts if weightless_last else parts[::-1]
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        with sync.no_sync():
            sync.backward(loss_of(model, part, rare=rare), weight=weight)
        sync.backward(loss_of(model, last[0], rare=last[2]), weight=last[1])
        seen.append(gradients(model))
        optimizer.step()
    assert_exact([[*seen, weights([model])]], oracle(rare_is_used=True))


@every_way
@pytest.mark.parametrize("how", ["driven", "plain"])
def test_borrowed_rows(way, how):
    def backwards(rank):
        if rank.number == 0:
            part, weight, rare = FIRST, 8, False
        else:
            part, weight, rare = slice(0, 1), 0, True
        rank.sync.set_delivered_weight(weight)
        if how == "driven":
            driven(rank, part, weight, rare=rare)
        else:
            loss_of(rank.model, part, rare=rare).backward()

    def body(rank):
        return trained(rank, lambda: backwards(rank))

    results = on_ranks(way, body, build=TwoLayers, ddp_args=UNUSED)
    assert_exact(results, oracle(rare_is_used=False))


@pytest.mark.sampled
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", ["TokenWeights", "WeightZero", "Branches"])
@pytest.mark.parametrize("num_workers", [3, 4])
@pytest.mark.parametrize("split", BORROWED)
def test_borrowed_rows_in_the_trainer_also_with_a_weight_of_their_own(
    sync, name, num_workers, split
):
    """A step that weighs its batch by tokens does not know that the batch is borrowed."""
    check(on_threads(sync, name, split, num_workers), name, split)
