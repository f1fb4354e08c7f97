# SPDX-License-Identifier: Apache-2.0
"""The gradients of a step in shard order: the same bits at every number of ranks, and right."""

import pytest
import torch
from torch import nn

from harness import assert_same, gradients, reset, rows, run_ranks
from lockstep.data import shards_of
from lockstep.errors import WrongUseError
from lockstep.sync import GradientSync, ShardOrder

STEPS = 3


def build():
    """Several buckets at a cap of 2 KB, and a layer that not every shard uses."""
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh())
    model.append(nn.Linear(30, 3))
    return reset(model, seed=3)


def loss_of(model, part, shard):
    hidden = model[:4](part) if shard % 3 else model[1](model[0](part)).repeat(1, 1)[:, :30]
    return model[4](hidden).square().mean()


def shards_of_step(step, num_shards, *, uneven):
    """Rows of every shard; the last ones have none where they are uneven."""
    sizes = [4] * num_shards if not uneven else [5, 4, 3, 7, 2, 0, 0][:num_shards]
    data = rows(sum(sizes), 6, seed=step).float()
    return data.split(sizes)


def trained(size, num_shards, *, uneven, accumulate=1, cap_mb=0.002, expect=True):
    """The gradients after every step, of every rank; a step consumes `accumulate` batches."""
    replicas = [build().float() for _ in range(size)]
    by_rank = [shards_of(rank, size, num_shards) for rank in range(size)]

    def body(group):
        model = replicas[group.rank]
        order = ShardOrder(num_shards, by_rank, group.rank)
        sync = GradientSync([model], group, bucket_cap_mb=cap_mb, order=order)
        if expect:
            sync.expect_weight(sum(map(len, shards_of_step(0, num_shards, uneven=uneven))))
        seen = []
        for step in range(STEPS):
            model.zero_grad()
            for batch in range(accumulate):
                parts = shards_of_step(accumulate * step + batch, num_shards, uneven=uneven)
                mine = [(s, parts[s]) for s in by_rank[group.rank] if len(parts[s])]
                _one_batch(sync, model, mine, closes=batch == accumulate - 1)
            seen.append(gradients(model))
        sync.detach()
        return seen

    return run_ranks(size, body)


def _one_batch(sync, model, mine, *, closes):
    for position, (shard, part) in enumerate(mine):
        loss = loss_of(model, part, shard)
        if closes and position == len(mine) - 1:
            with sync.last_shard(shard):
                sync.backward(loss, weight=len(part))
        else:
            with sync.no_sync():
                sync.backward(loss, weight=len(part))
            sync.take_shard(shard)
    if closes and not mine:
        sync.reduce_pending()


def same_bits(one, other):
    return all(
        one_step.keys() == other_step.keys()
        and all(torch.equal(one_step[name], other_step[name]) for name in one_step)
        for one_step, other_step in zip(one, other, strict=True)
    )


@pytest.mark.sampled
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("num_shards", [2, 4, 7])
def test_the_same_bits_at_every_number_of_ranks(num_shards, uneven, accumulate):
    arguments = {"uneven": uneven, "accumulate": accumulate}
    (alone,) = trained(1, num_shards, **arguments)
    for size in {min(size, num_shards) for size in (2, 3, 4)}:
        for found in trained(size, num_shards, **arguments):
            assert same_bits(found, alone)


@pytest.mark.parametrize("expect", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_they_are_the_gradients_of_the_global_objective(size, expect):
    seen = trained(size, 4, uneven=True, accumulate=2, expect=expect)[0]
    for step, got in enumerate(seen):
        model = build()
        batches = [shards_of_step(2 * step + batch, 4, uneven=True) for batch in range(2)]
        total = sum(len(part) for parts in batches for part in parts)
        for parts in batches:
            for shard, part in enumerate(parts):
                (loss_of(model, part.double(), shard) * len(part) / total).backward()
        true = {name: grad.float() for name, grad in gradients(model).items()}
        assert_same(got, true, tolerance=1e-5)


def test_two_ranks_add_while_backward_still_runs():
    """With a shard each, all buckets but the last are on their way before backward has ended."""
    replicas = [build() for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        order = ShardOrder(2, [range(1), range(1, 2)], group.rank)
        sync = GradientSync([model], group, bucket_cap_mb=0.002, order=order)
        launched = []
        # A hook on the parameter would be run on the reduced gradient.
        first = model[0].weight.view_as(model[0].weight).grad_fn.next_functions[0][0]
        first.register_prehook(lambda _: launched.append(sync._rounds.transport.is_half_sent))
        for _ in range(2):  # the first backward only looks which gradients come
            with sync.last_shard(group.rank):
                sync.backward(model(rows(4, 6, seed=group.rank)).mean(), weight=4)
        sync.detach()
        return launched

    assert run_ranks(2, body) == [[False, True]] * 2


def test_a_backward_of_the_users_own_is_still_refused():
    def body(group):
        model = build()
        order = ShardOrder(2, [range(2)], 0)
        sync = GradientSync([model], group, order=order)
        with sync.last_shard(1):
            sync.backward(model(rows(4, 6, seed=0)).mean(), weight=4)
        with pytest.raises(WrongUseError):
            sync.backward(model(rows(4, 6, seed=0)).mean(), weight=4)
        with pytest.raises(WrongUseError):
            model(rows(4, 6, seed=0)).mean().backward()
        sync.detach()

    run_ranks(1, body)


def test_a_layer_that_is_unfrozen_within_a_window_is_named_on_every_rank():
    replicas = [build() for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        model[0].requires_grad_(False)
        sync = GradientSync(
            [model], group, order=ShardOrder(2, [range(1), range(1, 2)], group.rank)
        )
        mine = [(group.rank, rows(4, 6, seed=group.rank))]
        _one_batch(sync, model, mine, closes=False)
        model[0].requires_grad_(True)
        with pytest.raises(WrongUseError, match=r"unfrozen within.*\n[^`]*`0\.weight`, `0\.bias`"):
            _one_batch(sync, model, mine, closes=True)
        model.zero_grad()
        for closes in (False, True):
            _one_batch(sync, model, mine, closes=closes)
        sync.detach()
        return gradients(model)

    for found in run_ranks(2, body):
        model = build()
        for shard in (0, 1):
            (loss_of(model, rows(4, 6, seed=shard), shard) / 2).backward()
        assert_same(found, gradients(model), tolerance=1e-6)
