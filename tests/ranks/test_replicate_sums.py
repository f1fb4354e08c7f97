# SPDX-License-Identifier: Apache-2.0
"""Losses that are sums: gradients are added over ranks, exactly, and never divided."""

import pytest
import torch
from torch import nn

from harness import assert_equal_on_all_ranks, assert_same, cut, gradients, reset, rows, run_ranks
from lockstep.errors import MixedWeightsError
from lockstep.sync import GradientSync

TOTAL = 12
SHARES = {
    "alone": [12],
    "even": [6, 6],
    "uneven": [9, 3],
    "empty": [12, 0],
    "empty_first": [0, 5, 7],
    "four": [5, 1, 2, 4],
}


def model():
    return reset(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), 1)


def loss_of(net, features, targets):
    return (net(features) - targets).square().sum()


def batches():
    return [(rows(TOTAL, 3, seed), rows(TOTAL, 2, seed + 50)) for seed in range(3)]


class Alone:
    """The oracle: plain autograd on the whole batch."""

    def __init__(self):
        self.net = model()

    def backward(self, features, targets, *, paused=False):
        loss_of(self.net, features, targets).backward()


class OnOneRank(Alone):
    def __init__(self, net, group, counts, way, cap_mb):
        self.net, self.way = net, way
        self.mine = cut(TOTAL, counts)[group.rank]
        self.sync = GradientSync([net], group, bucket_cap_mb=cap_mb, averages=False)

    def backward(self, features, targets, *, paused=False):
        features, targets = features[self.mine], targets[self.mine]
        weight = len(features)
        if weight == 0 and self.way == "pending":
            return None if paused else self.sync.reduce_pending()
        if weight == 0:
            features, targets = torch.full((1, 3), torch.nan).double(), torch.zeros(1, 2).double()
        if paused:
            with self.sync.no_sync():
                return self._run(features, targets, weight)
        return self._run(features, targets, weight)

    def _run(self, features, targets, weight):
        loss = loss_of(self.net, features, targets)
        if self.way == "weighted":
            self.sync.backward(loss, weight=weight)
        else:
            self.sync.set_delivered_weight(weight)
            loss.backward()


def one_backward(world):
    yield world.backward(*batches()[0])


def several_backwards_add_up(world):
    for batch in batches():
        yield world.backward(*batch)


def cleared_to_zero(world):
    for batch in batches():
        yield world.backward(*batch)
        world.net.zero_grad(set_to_none=False)


def accumulated(world):
    for batch in batches()[:2]:
        world.backward(*batch, paused=True)
    yield world.backward(*batches()[2])
    world.backward(*batches()[0], paused=True)
    yield world.backward(*batches()[1])


def changed_in_between(world):
    yield world.backward(*batches()[0])
    for param in world.net.parameters():
        param.grad = param.grad * 0.5
    yield world.backward(*batches()[1])


def partly_frozen(world):
    world.net[0].requires_grad_(False)
    yield world.backward(*batches()[0])
    world.net[0].requires_grad_(True)
    yield world.backward(*batches()[1])
    yield world.backward(*batches()[2])


def with_a_gradient_by_hand(world):
    yield world.backward(*batches()[0])
    # Not an accumulation, so nothing to be summed, and no rank need do it.
    torch.autograd.grad(loss_of(world.net, *batches()[1]), list(world.net.parameters()))
    yield world.backward(*batches()[1])


PROGRAMS = [
    one_backward, several_backwards_add_up, cleared_to_zero, accumulated, changed_in_between,
    partly_frozen, with_a_gradient_by_hand,
]  # fmt: skip


def seen(program, world):
    return [gradients(world.net) for _ in program(world)]


def test_a_window_of_which_one_batch_is_empty_is_refused_with_its_reason():
    nets = [model() for _ in range(2)]

    def on_one_rank(group):
        sync = GradientSync([nets[group.rank]], group, averages=False)
        features, targets = batches()[0]
        sync.set_delivered_weight(3)
        with sync.no_sync():
            loss_of(nets[group.rank], features[:3], targets[:3]).backward()
        sync.set_delivered_weight(group.rank * 3)
        with pytest.raises(MixedWeightsError, match=r"(?s)from 1.0 to 0.0.*holds no samples"):
            loss_of(nets[group.rank], features[:1], targets[:1]).backward()
        sync.detach()
        return True

    assert run_ranks(2, on_one_rank) == [True, True]


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["plain", "weighted", "pending"])
@pytest.mark.parametrize("counts", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_one_process(program, counts, way):
    # Small buckets for all but the even split: then several are in flight during backward.
    cap_mb = 25 if counts == [6, 6] else 1e-4
    true = seen(program, Alone())
    nets = [model() for _ in counts]

    def on_one_rank(group):
        rank = OnOneRank(nets[group.rank], group, counts, way=way, cap_mb=cap_mb)
        try:
            return seen(program, rank)
        finally:
            rank.sync.detach()

    results = run_ranks(len(counts), on_one_rank)
    for step, expected in enumerate(true):
        assert_equal_on_all_ranks([result[step] for result in results])
        assert_same(results[0][step], expected)


def test_own_and_borrowed_batches_in_one_window_are_refused_on_every_rank():
    nets = [model(), model()]

    def one_rank(group):
        sync = GradientSync([nets[group.rank]], group, averages=False)
        features, targets = batches()[0]
        sync.set_delivered_weight(3)
        with sync.no_sync():
            loss_of(nets[group.rank], features, targets).backward()
        sync.set_delivered_weight(group.rank)
        with pytest.raises(MixedWeightsError):
            loss_of(nets[group.rank], features, targets).backward()
        sync.detach()

    run_ranks(2, one_rank)
