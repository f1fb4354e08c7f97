# SPDX-License-Identifier: Apache-2.0
"""Windows that a program leaves, closes or looks away from: no gradient goes with them unseen."""

import pytest
import torch
from torch import nn

from harness import gradients, outcomes, reset, rows, run_ranks
from lockstep.errors import GradientNotReducedError, PeerLostError
from lockstep.sync import replicate
from lockstep.sync.ddp_sync import DDPSync
from ranks.test_replicate_exact import weights
from ranks.ways import assert_exact, built, every_way, mean_square, momentum, on_ranks

X = rows(8, 4, seed=1)


def both():
    return reset(nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]), seed=3)


def on_two(body, build=both):
    """What `body(group, model, sync)` returned, or raised, on each of two ranks."""
    replicas = [build() for _ in range(2)]

    def one(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        try:
            return body(group, model, sync)
        finally:
            sync.detach()

    return outcomes(2, one)


def mine(group):
    return X[4 * group.rank : 4 * group.rank + 4]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_step_does_not_throw_away_what_another_window_hides():
    """The window is the second player's; the first one's reduced gradient is not shown in it."""

    def body(group, model, sync):
        first = sgd(model[0])
        model[0](mine(group)).square().mean().backward()
        with sync.no_sync():
            model[1](mine(group)).square().mean().backward()
        first.step()

    assert [type(result) for result in on_two(body)] == [GradientNotReducedError] * 2


def test_zeroing_one_player_in_a_window_does_not_drop_the_other():
    def body(group, model, sync):
        model[0](mine(group)).square().mean().backward()
        with sync.no_sync():
            model[1](mine(group)).square().mean().backward()
        sgd(model[1]).zero_grad()
        model[1](mine(group)).square().mean().backward()

    assert [type(result) for result in on_two(body)] == [GradientNotReducedError] * 2


def test_a_window_that_was_clipped_is_refused_by_reduce_pending_too():
    def body(group, model, sync):
        with sync.no_sync():
            (model[0](mine(group)) + model[1](mine(group))).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        sync.reduce_pending()

    assert [type(result) for result in on_two(body)] == [GradientNotReducedError] * 2


@pytest.mark.parametrize("weight", [None, 4])
def test_gradients_that_one_rank_alone_has_zeroed_are_refused(weight):
    def body(group, model, sync):
        for _ in range(2):
            loss = (model[0](mine(group)) + model[1](mine(group))).square().mean()
            sync.backward(loss, weight=weight)
            if group.rank == 0:
                model.zero_grad()

    assert [type(result) for result in on_two(body)] == [GradientNotReducedError] * 2


def ddp_on_two(body, **ddp_args):
    replicas = [reset(nn.Linear(4, 3), seed=3) for _ in range(2)]

    def one(group):
        sync = DDPSync([replicas[group.rank]], group, ddp_args=ddp_args)
        try:
            return body(group, sync.models[0], sync)
        finally:
            sync.detach()

    return run_ranks(2, one)


def test_kept_gradients_of_ddp_stay_where_its_buckets_are_views():
    def body(group, model, sync):
        sync.backward(model(mine(group)).square().mean(), weight=4)
        kept = [param.grad for param in model.parameters()]
        before = [grad.clone() for grad in kept]
        model.zero_grad()
        sync.backward(3 * model(mine(group)).square().mean(), weight=4)
        return all(map(torch.equal, kept, before))

    assert ddp_on_two(body, gradient_as_bucket_view=True) == [True, True]


def test_a_gradient_in_the_place_of_a_freed_one_is_another_gradient():
    """Python gives a freed object's id to the next one: ids do not say what a window holds."""

    def body(group, model, sync):
        with sync.no_sync():
            model[0](mine(group)).square().mean().backward()
        weight = model[0].weight
        value, place = weight.grad.tolist(), id(weight.grad)
        weight.grad = None
        others = []
        while id(other := torch.tensor(value).double().mul(0.5)) != place and len(others) < 1000:
            others.append(other)
        weight.grad = other
        model[0](mine(group)).square().mean().backward()

    assert [type(result) for result in on_two(body)] == [GradientNotReducedError] * 2


def test_a_rank_without_rows_hears_that_nobody_closed_the_window():
    """The gradients of its last step are still there, and are not those of this one."""
    taken = []

    def body(group, model, sync):
        optimizer = sgd(model)
        (model[0](mine(group)) + model[1](mine(group))).square().mean().backward()
        optimizer.step()
        with sync.no_sync():
            if group.rank == 0:
                model[0](mine(group)).square().mean().backward()
        optimizer.step()
        taken.append(group.rank)

    assert [type(result) for result in on_two(body)] == [GradientNotReducedError, PeerLostError]
    assert taken == []


def test_reduced_gradients_are_used_twice_after_no_sync_without_a_backward():
    def body(group, model, sync):
        optimizer = sgd(model)
        (model[0](mine(group)) + model[1](mine(group))).square().mean().backward()
        optimizer.step()
        with sync.no_sync():
            model[0](mine(group))
        optimizer.step()
        return weights([model])

    true = both()
    optimizer = sgd(true)
    (true[0](X) + true[1](X)).square().mean().backward()
    optimizer.step()
    optimizer.step()
    assert_exact([[found] for found in on_two(body)], [weights([true])])


@every_way
def test_a_rank_without_rows_closes_a_window_after_layers_were_frozen(way):
    """It has run no forward since, where DDP would have made its buckets anew."""

    def body(rank):
        rank.params[0].requires_grad_(False)
        if rank.number == 1:
            with rank.sync.no_sync():
                mean_square(rank.model).backward()
        rank.sync.reduce_pending()
        seen = gradients(rank.plain)
        rank.optimizer.step()
        return [seen, weights([rank.plain])]

    true = built()
    next(iter(true.parameters())).requires_grad_(False)
    optimizer = momentum(true)
    mean_square(true).backward()
    seen = gradients(true)
    optimizer.step()
    assert_exact(on_ranks(way, body), [seen, weights([true])])


def test_a_model_of_several_is_frozen_as_a_whole_before_a_window_under_ddp():
    """A rank that follows makes new buckets of what is left, and of that model there is nothing."""

    def body(group):
        first, second = both()
        sync = DDPSync([first, second], group, ddp_args={})
        second.requires_grad_(False)
        with sync.no_sync():
            model, last = sync.models
            sync.backward((model(mine(group)) * last(mine(group))).mean(), weight=4)
        sync.reduce_pending()
        sync.detach()
        return gradients(first)

    first, second = both()
    second.requires_grad_(False)
    (first(X) * second(X)).mean().backward()
    assert_exact([[found] for found in run_ranks(2, body)], [gradients(first)])


class LeftOrRight(nn.Module):
    """One of two layers, as the caller says."""

    def __init__(self):
        super().__init__()
        self.layers = both()

    def forward(self, x, chosen):
        return self.layers[chosen](x)


def test_a_window_follows_a_forward_under_ddp_whose_backward_never_came():
    """The reducer took what that forward had not used for done, and the window uses it."""

    def loss(model, part, chosen):
        return model(part, chosen).square().mean()

    def body(group):
        plain = LeftOrRight()
        options = {"find_unused_parameters": True}
        sync = DDPSync([plain], group, ddp_args=options)
        model, part = sync.models[0], mine(group)
        torch.autograd.grad(loss(model, part, 0), list(plain.layers[0].parameters()))
        with sync.no_sync():
            sync.backward(loss(model, part, 1), weight=4)
        sync.backward(loss(model, part, 0), weight=4)
        sync.detach()
        return gradients(plain)

    true = LeftOrRight()
    ((loss(true, X, 0) + loss(true, X, 1)) / 2).backward()
    assert_exact([[found] for found in run_ranks(2, body)], [gradients(true)])
