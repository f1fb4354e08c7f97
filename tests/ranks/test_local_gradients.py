# SPDX-License-Identifier: Apache-2.0
"""A local parameter's gradient is that of the mean over its own rank's samples, whoever weighs."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from harness import reset, rows, run_ranks
from lockstep import local
from lockstep.sync import replicate

X = rows(24, 4, seed=1)
COUNTS = ([3, 2, 4], [6, 1, 8])
"""Samples of each rank's batches; of two steps, the first has one batch and the second two."""


class Routed(nn.Module):
    """Each rank has a router of its own before layers that they share."""

    def __init__(self):
        super().__init__()
        self.router, self.layer = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, features):
        return self.layer(features * self.router(features).sigmoid()).square().sum(1)


def batches_of(rank):
    return (X[:9] if rank == 0 else X[9:]).split(COUNTS[rank])


def true_gradients(rank, batches, scale=1.0):
    model = reset(Routed(), seed=3)
    (scale * torch.cat([model(batch) for batch in batches]).mean()).backward()
    return [parameter.grad for parameter in model.router.parameters()]


def own_gradients(model):
    gradients = [parameter.grad for parameter in model.router.parameters()]
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_windows_of_one_batch_and_of_two(factor):
    """Also in the first step, in which no rank knows what a batch weighs; weights are tokens."""
    replicas = [reset(Routed(), seed=3) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        local(model.router)
        sync = replicate(model, group=group)
        first, *window = batches_of(group.rank)
        sync.backward(model(first).mean(), weight=factor * len(first))
        found = [own_gradients(model)]
        for batch in window:
            with sync.no_sync() if batch is window[0] else nullcontext():
                sync.backward(model(batch).mean(), weight=factor * len(batch))
        found.append(own_gradients(model))
        sync.detach()
        return found

    for rank, got in enumerate(run_ranks(2, body)):
        first, *window = batches_of(rank)
        for mine, batches in zip(got, ([first], window), strict=True):
            for one, true in zip(mine, true_gradients(rank, batches), strict=True):
                assert (one - true).abs().max() < 1e-12


def test_they_add_up_over_steps_and_a_batch_without_weight_leaves_nothing():
    replicas = [reset(Routed(), seed=3) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        local(model.router)
        sync = replicate(model, group=group)
        first, second, _ = batches_of(group.rank)
        for batch in (first, second):
            sync.backward(model(batch).mean(), weight=len(batch))
        weight = 0 if group.rank == 0 else 4
        loss = model(first).mean() * (torch.nan if weight == 0 else 0.0)
        sync.backward(loss, weight=weight)
        found = own_gradients(model)
        sync.backward(
            model(first).mean() * torch.nan if not weight else model(first).mean(), weight
        )
        zeros = own_gradients(model)
        sync.detach()
        return found, zeros

    (found, zeros), (others, _) = run_ranks(2, body)
    for rank, mine in enumerate((found, others)):
        pairs = [true_gradients(rank, [batch]) for batch in batches_of(rank)[:2]]
        for one, *both in zip(mine, *pairs, strict=True):
            assert (one - sum(both)).abs().max() < 1e-12
    assert all(torch.equal(zero, torch.zeros_like(zero)) for zero in zeros)


@pytest.mark.parametrize("part", ["router", "layer"])
def test_a_plain_backward_of_a_borrowed_batch_leaves_nothing(part):
    """Whether the gradients come before or behind those that the ranks share."""
    replicas = [reset(Routed(), seed=3) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        own = local(getattr(model, part))
        sync = replicate(model, group=group)
        first, second, _ = batches_of(group.rank)
        found = []
        for weights in ((3.0, 0.0), (3.0, 4.0), (3.0, 0.0)):
            sync.set_delivered_weight(weights[group.rank])
            batch = first if weights[group.rank] else X[:3]
            model(batch).mean().backward()
            grads = [parameter.grad for parameter in own.parameters()]
            found.append([None if grad is None else grad.clone() for grad in grads])
            mine = set(own.parameters())
            for parameter in model.parameters():
                if group.rank == 0 or parameter not in mine:
                    parameter.grad = None
        sync.detach()
        model(second).mean().backward()
        assert not any(map(torch.equal, found[-1], (p.grad for p in own.parameters())))
        return found

    lends, borrows = run_ranks(2, body)
    true = reset(Routed(), seed=3)
    for rank, found in ((0, lends), (1, borrows)):
        true.zero_grad()
        true(batches_of(rank)[0]).mean().backward()
        for seen, parameter in zip(found[1], getattr(true, part).parameters(), strict=True):
            assert (seen - parameter.grad).abs().max() < 1e-12
    assert all(grad is None for grad in borrows[0])
    assert all(map(torch.equal, borrows[1], borrows[2]))
    assert all(map(torch.equal, lends[1], lends[2]))


def test_a_step_behind_a_validation_whose_last_batch_was_borrowed():
    """The default loop gives each backward its weight, and says nothing of the batch."""
    replicas = [reset(Routed(), seed=3) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        local(model.router)
        sync = replicate(model, group=group)
        sync.set_delivered_weight(group.rank - 1.0 and 3.0)
        with torch.no_grad():
            model(X[:3])
        sync.begin_step(0)
        batch = batches_of(group.rank)[0]
        sync.backward(model(batch).mean(), weight=len(batch))
        found = own_gradients(model)
        sync.detach()
        return found

    for rank, mine in enumerate(run_ranks(2, body)):
        for one, true in zip(mine, true_gradients(rank, batches_of(rank)[:1]), strict=True):
            assert (one - true).abs().max() < 1e-12


def test_a_layer_that_a_borrowed_batch_s_loop_unfreezes_gets_nothing():
    replicas = [reset(Routed(), seed=3) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        local(model.router).requires_grad_(False)
        sync = replicate(model, group=group)
        sync.set_delivered_weight(3.0 * group.rank)
        model.router.requires_grad_(True)
        model(X[:3]).mean().backward()
        found = own_gradients(model)
        sync.detach()
        return found

    borrows, owns = run_ranks(2, body)
    assert all(grad is None for grad in borrows)
    assert all(grad is not None for grad in owns)


@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("weight", [None, 1.0, 100.0])
def test_hooks_of_the_user_s_see_the_gradient_of_the_mean(registered, weight):
    """Also an optimizer in a hook, and in a window of two batches."""
    replicas = [reset(Routed(), seed=3) for _ in range(2)]

    def body(group):
        model, seen = replicas[group.rank], []
        own = local(model.router).weight

        def add_hooks():
            own.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
            own.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))

        if registered == "before":
            add_hooks()
        sync = replicate(model, group=group)
        if registered == "after":
            add_hooks()
        first, *window = batches_of(group.rank)
        if weight is None:
            sync.backward(model(first).mean())
        else:
            sync.backward(model(first).mean(), weight=weight * len(first))
            for batch in window:
                with sync.no_sync() if batch is window[0] else nullcontext():
                    sync.backward(model(batch).mean(), weight=weight * len(batch))
        torch.autograd.grad(model(first).mean(), own)
        sync.detach()
        model(first).mean().backward()
        return seen

    for rank, seen in enumerate(run_ranks(2, body)):
        first, *window = batches_of(rank)
        one, both = (true_gradients(rank, batches)[0] for batches in ([first], window))
        held, true = 2 * one, [one, 2 * one]
        if weight is not None:
            held = held + 2 * both
            true += [both, held]
        true += [one, one, held + 2 * one]
        assert len(seen) == len(true)
        for mine, expected in zip(seen, true, strict=True):
            assert (mine - expected).abs().max() < 1e-12


def test_a_hook_that_raises_raises_after_the_round():
    replicas = [reset(Routed(), seed=3) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group) if local(model.router) else None
        if group.rank == 0:
            handle = model.router.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                sync.backward(model(X[:3]).mean(), weight=3)
            handle.remove()
        else:
            sync.backward(model(X[:3]).mean(), weight=3)
        sync.detach()

    run_ranks(2, body)


def test_a_model_with_hooks_on_local_parameters_is_freed_without_detach():
    model = reset(Routed(), seed=3)
    local(model.router).weight.register_post_accumulate_grad_hook(lambda _: None)
    replicate(model).backward(model(X[:3]).mean(), weight=3)
    freed = weakref.ref(model.router)
    del model
    gc.collect()
    assert freed() is None
    replicate(reset(Routed(), seed=3)).detach()  # takes away torch's hooks that the sync has left
