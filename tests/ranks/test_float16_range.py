# SPDX-License-Identifier: Apache-2.0
"""Losses weighted by tokens stay in float16's range, from the first step on and in every window.

The numbers are float64, so that they compare with one process; `in_float16_range` alone stands for
what float16 does to a gradient that is too large.
"""

from functools import partial

import pytest
import torch
from torch import nn

import lockstep
from harness import assert_same, gradients, run_ranks
from lockstep.data import shards_of
from lockstep.sync import GradientSync, ShardOrder, SingleProcess, replicate
from ranks.programs import X, Y, mlp
from ranks.test_replicate_exact import weights
from ranks.ways import assert_exact, built, every_way, on_ranks

TOKENS = 5000
"""The weight of each row: a mean over tokens, of which each row has so many."""
PARTS = (slice(0, 8), slice(8, 12))
STEPS = 3
# The gradient of one process takes a quarter of the range, that of a loss times TOKENS overflows.
SCALE = 2.0**14


class _Float16Range(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        largest = torch.finfo(torch.float16).max
        return torch.where(gradient.abs() > largest, torch.inf, gradient)


class HalfPrecision(nn.Module):
    """Its last layer's gradients pass through float16."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return _Float16Range.apply(self.layers(x))


def loss_of(model, part):
    return ((model(X[part]) - Y[part]) ** 2).sum(dim=1).mean()


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained(model, optimizer, backwards):
    """The weights after each step, and the scale: it halves with every step that is lost."""
    scale, seen = scaler(), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        backwards(scale)
        scale.step(optimizer)
        scale.update()
        seen.append(weights([model]))
    assert scale.get_scale() == SCALE, "a step was lost"
    return seen


def oracle():
    true = built(HalfPrecision)
    whole = slice(0, 12)
    return trained(true, sgd(true), lambda scale: scale.scale(loss_of(true, whole)).backward())


def pieces(part, accumulate):
    """The micro-batches of a rank's rows, of unequal sizes."""
    first = part.start + (part.stop - part.start) // 2 + 1
    return [part] if accumulate == 1 else [slice(part.start, first), slice(first, part.stop)]


def weighted(sync, model, scale, part):
    loss = scale.scale(loss_of(model, part))
    sync.backward(loss, weight=TOKENS * (part.stop - part.start))


def in_windows(sync, model, parts, scale):
    for part in parts[:-1]:
        with sync.no_sync():
            weighted(sync, model, scale, part)
    weighted(sync, model, scale, parts[-1])


@every_way
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_no_step_is_lost_on_ranks(way, accumulate, cap_mb):
    def body(rank):
        parts = pieces(PARTS[rank.number], accumulate)
        run = partial(in_windows, rank.sync, rank.model, parts)
        return trained(rank.plain, rank.optimizer, run)

    results = on_ranks(way, body, build=HalfPrecision, make=sgd, bucket_cap_mb=cap_mb)
    assert_exact(results, oracle())


def test_no_step_is_lost_without_peers():
    model = built(HalfPrecision)
    sync = SingleProcess([model], averages=True)
    parts = pieces(slice(0, 12), 2)
    run = partial(in_windows, sync, model, parts)
    assert_exact([trained(model, sgd(model), run)], oracle())


@pytest.mark.parametrize("size", [1, 2])
def test_no_step_is_lost_in_shard_order(size):
    """No unit is ever learned there: it would depend on the number of ranks."""
    replicas = [built(HalfPrecision) for _ in range(size)]
    parts = [slice(0, 5), slice(5, 8), slice(8, 10), slice(10, 12)]
    by_rank = [shards_of(rank, size, len(parts)) for rank in range(size)]

    def body(group):
        model, mine = replicas[group.rank], by_rank[group.rank]
        order = ShardOrder(len(parts), by_rank, group.rank)
        sync = GradientSync([model], group, bucket_cap_mb=1e-4, order=order)
        sync.expect_weight(12)

        def backwards(scale):
            for shard in mine[:-1]:
                with sync.no_sync():
                    weighted(sync, model, scale, parts[shard])
                sync.take_shard(shard)
            with sync.last_shard(mine[-1]):
                weighted(sync, model, scale, parts[mine[-1]])

        try:
            return trained(model, sgd(model), backwards)
        finally:
            sync.detach()

    assert_exact(run_ranks(size, body), oracle())


def _mean_distance(rows, group, **options):
    left, right = (lockstep.gather(each, group=group, **options) for each in (rows, rows.flip(1)))
    return (left.unsqueeze(1) - right).square().mean()


def _replicated(rows, group):
    return _mean_distance(rows, group, backward="replicated")


def _global_mean(rows, group):
    return lockstep.global_mean(rows.square().sum(dim=1), group=group)


def _info_nce(rows, group, **options):
    return lockstep.info_nce(rows, rows.flip(1), 0.5, group=group, **options)


def _info_nce_of_rows(rows, group):
    return _info_nce(rows, group, reduction="none")


def _shifted_info_nce(rows, group):
    places = lockstep.rank_slice(rows, group=group)
    positives = (torch.arange(places.start, places.stop) + 1) % 12
    return _info_nce(rows, group, positives=positives)


def _nt_xent(rows, group, **options):
    return lockstep.nt_xent(rows, rows.flip(1), 0.5, group=group, **options)


def _nt_xent_of_rows(rows, group):
    return _nt_xent(rows, group, reduction="none")


CROSSING = [
    _mean_distance,
    _replicated,
    _global_mean,
    _info_nce,
    _info_nce_of_rows,
    _shifted_info_nce,
    _nt_xent,
    _nt_xent_of_rows,
]


@pytest.mark.parametrize("function", CROSSING)
def test_gradients_that_cross_ranks_in_the_first_backward(function):
    """The roots of the ranks are divided by other numbers there, which no gradient may carry."""
    tokens, replicas, true = (3.0, 1100.0), [built() for _ in PARTS], built()

    def whole(group):
        losses = function(true(X), group)
        if losses.ndim:
            by_rank = [
                losses[part].mean() * count for part, count in zip(PARTS, tokens, strict=True)
            ]
            losses = sum(by_rank) / sum(tokens)
        losses.backward()
        return gradients(true)

    def on_rank(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        try:
            loss = function(model(X[PARTS[group.rank]]), group).mean()
            sync.backward(loss, weight=tokens[group.rank])
            return gradients(model)
        finally:
            sync.detach()

    (expected,) = run_ranks(1, whole)
    for found in run_ranks(2, on_rank):
        assert_same(found, expected)
