# SPDX-License-Identifier: Apache-2.0
"""What a window of backwards may hold, what weights may be, and what every rank hears of it."""

from functools import partial

import pytest
import torch
from torch import nn

from harness import assert_same, cut, gradients, outcomes, reset, rows, run_ranks
from lockstep.errors import (
    GradientNotReducedError,
    MixedWeightsError,
    SparseGradientError,
    WeightError,
)
from lockstep.sync import replicate

X = rows(8, 4, seed=1)


def models(count, build=lambda: nn.Linear(4, 3)):
    return [reset(build(), seed=3) for _ in range(count)]


def test_plain_backwards_under_no_sync_are_torchs_sum():
    replicas = models(2)

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        mine = X[group.rank * 4 : group.rank * 4 + 4]
        with sync.no_sync():
            model(mine[:2]).square().mean().backward()
        model(mine[2:]).square().mean().backward()
        sync.detach()
        return gradients(model)

    (true,) = models(1)
    for part in X.split(2):
        (true(part).square().mean() / 2).backward()
    for got in run_ranks(2, body):
        assert_same(got, gradients(true))


def test_reduce_pending_closes_a_window():
    replicas = models(2)

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        count = (5, 3)[group.rank]
        mine = X[:5] if group.rank == 0 else X[5:]
        with sync.no_sync():
            sync.backward(model(mine).square().sum(1).mean(), weight=count)
        sync.reduce_pending()
        sync.detach()
        return gradients(model)

    (true,) = models(1)
    true(X).square().sum(1).mean().backward()
    for got in run_ranks(2, body):
        assert_same(got, gradients(true))


def test_reduce_pending_on_all_ranks_changes_nothing():
    replicas = models(2)

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        sync.reduce_pending()
        before = gradients(model)
        model(X).square().mean().backward()
        reduced = gradients(model)
        sync.reduce_pending()
        after = gradients(model)
        sync.detach()
        return before, reduced, after

    for before, reduced, after in run_ranks(2, body):
        assert all(grad is None for grad in before.values())
        assert_same(after, reduced, tolerance=0.0)


def test_zero_weight_takes_nan_out_of_a_window_and_out_of_a_round():
    replicas = models(2)

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        poison = model(X * torch.nan).mean()
        with sync.no_sync():
            sync.backward(model(X[:3]).square().sum(1).mean(), weight=3)
        with sync.no_sync():
            sync.backward(poison, weight=0)
        if group.rank == 0:
            sync.backward(model(X[3:]).square().sum(1).mean(), weight=5)
        else:
            sync.backward(model(X * torch.nan).mean(), weight=0)
        sync.detach()
        return gradients(model)

    (true,) = models(1)
    total = 2 * true(X[:3]).square().sum() + true(X[3:]).square().sum()
    (total / 11).backward()
    for got in run_ranks(2, body):
        assert_same(got, gradients(true))


@pytest.mark.parametrize("expected", [8.0, 400.0, None], ids=["known", "wrong", "unknown"])
@pytest.mark.parametrize("plain", [False, True])
def test_what_steps_weigh_may_be_said_beforehand(plain, expected):
    """It decides what is scaled when, never the result; nor does an earlier round."""
    replicas = models(3, lambda: nn.Linear(4, 3, dtype=torch.float64))
    x = rows(8, 4, seed=3)
    cuts = {1: cut(3, [1, 1, 1]), 2: cut(8, [5, 2, 1])}

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        sync.expect_weight(expected)
        for step, cuts_of_step in cuts.items():
            part = x[cuts_of_step[group.rank]]
            sync.begin_step(step)
            sync.set_delivered_weight(len(part))
            model.zero_grad()
            loss = model(part).square().mean()
            loss.backward() if plain else sync.backward(loss, weight=len(part))
        sync.detach()
        return gradients(model)

    (true,) = models(1, lambda: nn.Linear(4, 3, dtype=torch.float64))
    true(x).square().mean().backward()
    for got in run_ranks(3, body):
        assert_same(got, gradients(true))


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "many"])
def test_a_bad_weight_is_refused_at_once(weight):
    def body(group):
        sync = replicate(reset(nn.Linear(4, 3), seed=1), group=group)
        with pytest.raises(WeightError, match=r"LS202"):
            sync.set_delivered_weight(weight)
        with pytest.raises(WeightError, match=r"rank \d of 2"):
            sync.backward(torch.zeros(()), weight=weight)
        sync.detach()
        return True

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("plain", [False, True])
def test_weights_that_add_up_to_zero_are_refused_on_every_rank(plain):
    replicas = models(2)

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        if plain:
            sync.set_delivered_weight(0)
        backward = torch.Tensor.backward if plain else partial(sync.backward, weight=0)
        with pytest.raises(WeightError, match="add up to zero"):
            backward(model(X).mean())
        # Nothing is stuck: the next round works.
        sync.set_delivered_weight(None)
        model.zero_grad()
        sync.backward(model(X).square().mean(), weight=2)
        sync.detach()
        return gradients(model)

    (true,) = models(1)
    true(X).square().mean().backward()
    for got in run_ranks(2, body):
        assert_same(got, gradients(true))


@pytest.mark.parametrize("first_is_plain", [False, True])
def test_plain_and_weighted_in_one_window_are_refused(first_is_plain):
    replicas = models(2)

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        try:
            kinds = [torch.Tensor.backward, partial(sync.backward, weight=2)]
            first, second = kinds if first_is_plain else reversed(kinds)
            with sync.no_sync():
                first(model(X).mean())
                with pytest.raises(MixedWeightsError, match="LS201"):
                    second(model(X).mean())
        finally:
            sync.detach()
        return True

    assert run_ranks(2, body) == [True, True]


def test_unequal_weights_where_gradients_are_off():
    """As in an optimizer's step that is given a closure: backward itself does not ask."""
    replicas = models(2)

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        mine = X[:5] if group.rank else X[5:]
        with torch.no_grad():
            with torch.enable_grad():
                loss = model(mine).square().mean()
            sync.backward(loss, weight=len(mine))
        sync.detach()
        return gradients(model)

    (true,) = models(1)
    true(X).square().mean().backward()
    for found in run_ranks(2, body):
        assert_same(found, gradients(true))


def test_plain_on_one_rank_and_weighted_on_another_is_refused_on_both():
    replicas = models(2)

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        backward = torch.Tensor.backward if group.rank else partial(sync.backward, weight=2)
        with pytest.raises(MixedWeightsError, match="1 ranks plain, 1 ranks weighted"):
            backward(model(X).mean())
        sync.detach()
        return True

    assert run_ranks(2, body) == [True, True]


def test_a_delivered_weight_that_changes_inside_a_window_is_refused_on_both():
    replicas = models(2)

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        sync.set_delivered_weight(4)
        with sync.no_sync():
            model(X).mean().backward()
        sync.set_delivered_weight(4 if group.rank else 2)
        with pytest.raises(
            MixedWeightsError, match=r"(?s)changed from 4.0 to 2.0.*different sizes.*self.backward"
        ):
            model(X).mean().backward()
        sync.detach()
        return True

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_a_sparse_gradient_on_one_rank_is_refused_on_every_rank_by_name(cap_mb):
    class Bag(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=sparse)
            self.head = nn.Linear(3, 2)

        def forward(self, index):
            return self.head(self.table(index))

    replicas = [reset(Bag(sparse), seed=2) for sparse in (False, True)]

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group, bucket_cap_mb=cap_mb)
        with pytest.raises(SparseGradientError, match=r"rank 1 of 2(.|\n)*`table.weight`"):
            model(torch.tensor([0, 1])).mean().backward()
        left = gradients(model)
        sync.detach()
        return left

    for left in run_ranks(2, body):
        assert all(grad is None for grad in left.values())


def test_rounds_of_different_models_do_not_mix_silently():
    # Of the same size, so that the collectives themselves have nothing to complain about.
    builds = (
        lambda: nn.Linear(4, 3),
        lambda: nn.ParameterList([torch.zeros(3), torch.zeros(12)]),
    )
    replicas = [[reset(build(), seed=4) for build in builds] for _ in range(2)]

    def body(group):
        one, other = replicas[group.rank]
        syncs = [replicate(one, group=group), replicate(other, group=group)]
        try:
            sum(p.sum() for p in (other if group.rank else one).parameters()).backward()
        finally:
            for sync in syncs:
                sync.detach()

    for outcome in outcomes(2, body):
        assert isinstance(outcome, GradientNotReducedError), outcome
        assert "different rounds" in str(outcome)


def test_low_precision_weights_stay_exact_and_do_not_overflow():
    replicas = [nn.Linear(4, 3, bias=False).to(torch.float16) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        seen = []
        for _ in range(2):
            model.zero_grad()
            weight = (60_001, 30_001)[group.rank]
            sync.backward((model(torch.ones(1, 4).half())).float().sum() * 3, weight=weight)
            seen.append(gradients(model)["0.weight"])
        sync.detach()
        return seen

    for _, second in run_ranks(2, body):
        # To half a precision: each root is rounded once. Unscaled, 3 * 60 001 is infinite.
        torch.testing.assert_close(second, torch.full_like(second, 3.0), rtol=2e-3, atol=0)


def test_mixed_dtypes_are_reduced_each_in_its_own_bucket():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.middle = nn.Parameter(torch.ones(3, dtype=torch.float32))
            self.high = nn.Parameter(torch.ones(3, dtype=torch.float64))

    replicas = [Mixed() for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        loss = sum((p.double() * (1 + 2 * group.rank)).sum() for p in model.parameters())
        sync.backward(loss, weight=1 + group.rank)
        sync.detach()
        return gradients(model)

    for got in run_ranks(2, body):
        for name, tolerance in (("low", 1e-2), ("middle", 1e-6), ("high", 1e-15)):
            torch.testing.assert_close(
                got[f"0.{name}"].double(),
                torch.full((3,), 7 / 3, dtype=torch.float64),
                rtol=tolerance,
                atol=0,
            )


@pytest.mark.parametrize("weighted", [False, True])
def test_long_gradients_are_scaled_once_also_where_some_are_missing(weighted):
    """They are scaled while they are copied, and a None among them is found halfway."""

    def build():
        return nn.ModuleList(nn.Linear(256, 256, dtype=torch.float64) for _ in range(3))

    def loss(layers, x, rank):
        used = [0, 2] if rank == 0 else [0, 1, 2]
        return sum(layers[number](x).square().mean() for number in used)

    replicas = models(2, build)
    x = rows(6, 256, seed=3)
    cuts = cut(6, [4, 2])

    def body(group):
        layers, part = replicas[group.rank], x[cuts[group.rank]]
        sync = replicate(layers, group=group)
        own = loss(layers, part, group.rank)
        sync.backward(own, weight=len(part)) if weighted else own.backward()
        sync.detach()
        return gradients(layers)

    (true,) = models(1, build)
    shares = [4 / 6, 2 / 6] if weighted else [1 / 2, 1 / 2]
    for rank, share in enumerate(shares):
        (loss(true, x[cuts[rank]], rank) * share).backward()
    for got in run_ranks(2, body):
        assert_same(got, gradients(true))
