# SPDX-License-Identifier: Apache-2.0
"""Backwards that fail and are caught, windows that are given up, memory that is the user's."""

import pytest
import torch

from harness import gradients
from lockstep import replicate
from lockstep.errors import GradientNotReducedError, LockstepError
from lockstep.group import Group
from ranks.test_replicate_exact import weights
from ranks.ways import (
    assert_exact,
    built,
    every_way,
    mean_square,
    momentum,
    on_ranks,
    our_buckets,
    results_of,
)

PARTS = (slice(0, 8), slice(8, 12))


def reduced(rank, scale=1.0):
    part = PARTS[rank.number]
    rank.sync.backward(mean_square(rank.model, part) * scale, weight=part.stop - part.start)


def oracle(steps=3, times=1, scale=1.0):
    """`steps` steps of one process, each of `times` calls of the optimizer."""
    true, seen = built(), []
    optimizer = momentum(true)
    for _ in range(steps):
        optimizer.zero_grad()
        (mean_square(true) * scale).backward()
        seen.append(gradients(true))
        for _ in range(times):
            optimizer.step()
    return [*seen, weights([true])]


@every_way
def test_two_steps_with_one_reduced_gradient(way):
    def body(rank):
        seen = []
        for _ in range(3):
            rank.optimizer.zero_grad()
            reduced(rank)
            seen.append(gradients(rank.plain))
            rank.optimizer.step()
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    assert_exact(on_ranks(way, body), oracle(times=2))


@our_buckets
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_two_steps_with_one_reduced_gradient_that_was_changed_in_part(way, which):
    """All ranks did the same. DDP runs no round without a backward, and refuses it."""

    def body(rank):
        for step in range(3):
            rank.optimizer.zero_grad()
            reduced(rank)
            rank.optimizer.step()
            rank.params[which].grad.mul_(step - 1)
            rank.optimizer.step()
        return [weights([rank.plain])]

    true = built()
    optimizer, params = momentum(true), list(true.parameters())
    for step in range(3):
        optimizer.zero_grad()
        mean_square(true).backward()
        optimizer.step()
        params[which].grad.mul_(step - 1)
        optimizer.step()
    assert_exact(on_ranks(way, body, bucket_cap_mb=1e-4), [weights([true])])


@every_way
@pytest.mark.parametrize("changed_on", [0, 1])
def test_a_reduced_gradient_that_one_rank_alone_has_changed_is_refused(way, changed_on):
    def body(rank):
        reduced(rank)
        rank.optimizer.step()
        if rank.number == changed_on:
            rank.params[0].grad.mul_(3)
        rank.optimizer.step()
        rank.optimizer.zero_grad()
        reduced(rank)
        rank.optimizer.step()

    results, _ = results_of(way, body)
    assert all(isinstance(result, LockstepError) for result in results)


@every_way
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_window_that_is_zeroed_is_given_up_with_its_weights(way, set_to_none):
    def body(rank):
        part, seen = PARTS[rank.number], []
        for _ in range(2):
            rank.optimizer.zero_grad(set_to_none=set_to_none)
            with rank.sync.no_sync():
                rank.sync.backward(mean_square(rank.model, part) * 5, weight=100 + rank.number)
                rank.optimizer.zero_grad(set_to_none=set_to_none)
                rank.sync.backward(mean_square(rank.model, part), weight=part.stop - part.start)
            rank.sync.backward(mean_square(rank.model, part), weight=part.stop - part.start)
            seen.append(gradients(rank.plain))
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    assert_exact(on_ranks(way, body), oracle(steps=2))


class Boom(Exception):
    """The user's own."""


class Raise(torch.autograd.Function):
    """Goes off in backward, in the middle of the model."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Boom


def fail(rank, how):
    """The last layer has its gradient, the first one has none."""
    handle = rank.plain[0].register_forward_hook(lambda *args: Raise.apply(args[2]))
    loss = mean_square(rank.model, PARTS[rank.number])
    handle.remove()
    with pytest.raises(Boom):
        rank.sync.backward(loss, weight=3) if how == "driven" else loss.backward()


@every_way
@pytest.mark.parametrize("how", ["driven", "plain"])
@pytest.mark.parametrize("fails_on", [(0, 1), (1,)], ids=["all", "one"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_failed_backward_that_is_zeroed_is_nothing(way, how, fails_on, set_to_none):
    def body(rank):
        seen = []
        for step in range(3):
            rank.optimizer.zero_grad(set_to_none=set_to_none)
            if step and rank.number in fails_on:
                fail(rank, how)
                rank.optimizer.zero_grad(set_to_none=set_to_none)
            reduced(rank)
            seen.append(gradients(rank.plain))
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    assert_exact(on_ranks(way, body), oracle())


@every_way
@pytest.mark.parametrize("how", ["driven", "plain"])
def test_a_failed_backward_is_not_stepped_with(way, how):
    def body(rank):
        before = weights([rank.plain])
        fail(rank, how)
        with pytest.raises(GradientNotReducedError, match="LS101"):
            rank.optimizer.step()
        return [before, weights([rank.plain])]

    assert_exact(on_ranks(way, body), [weights([built()])] * 2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_alone_may_put_in_gradients_after_a_failed_backward(set_to_none):
    model, true = built(), built()
    optimizer, oracle_optimizer = momentum(model), momentum(true)
    sync = replicate(model, group=Group(None))
    handle = model[0].register_forward_hook(lambda *args: Raise.apply(args[2]))
    loss = mean_square(model)
    handle.remove()
    with pytest.raises(Boom):
        loss.backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter, gradient in zip(
        model.parameters(),
        torch.autograd.grad(mean_square(model), list(model.parameters())),
        strict=True,
    ):
        parameter.grad = gradient
    optimizer.step()
    sync.detach()
    mean_square(true).backward()
    oracle_optimizer.step()
    torch.testing.assert_close(model.state_dict(), true.state_dict(), rtol=0, atol=1e-14)


def flat_gradients(params):
    """One tensor of the user's own, in which every gradient lies."""
    flat = torch.zeros(sum(param.numel() for param in params), dtype=torch.float64)
    pieces = flat.split([param.numel() for param in params])
    for param, piece in zip(params, pieces, strict=True):
        param.grad = piece.view_as(param)
    return flat


@every_way
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_gradients_in_memory_of_the_users_stay_there(way, cap_mb):
    def body(rank):
        flat = flat_gradients(rank.params)
        own, seen = [param.grad for param in rank.params], []
        for _ in range(3):
            rank.optimizer.zero_grad(set_to_none=False)
            reduced(rank)
            assert all(p.grad is grad for p, grad in zip(rank.params, own, strict=True))
            seen.append({"flat": flat.clone()})
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    true, seen = built(), []
    optimizer = momentum(true)
    flat = flat_gradients(list(true.parameters()))
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        mean_square(true).backward()
        seen.append({"flat": flat.clone()})
        optimizer.step()
    assert_exact(on_ranks(way, body, bucket_cap_mb=cap_mb), [*seen, weights([true])])


@our_buckets
def test_gradients_in_memory_of_the_users_are_clipped_there(way):
    """As sharded optimizers and fused clipping do: one kernel over the flat tensor."""

    def body(rank):
        flat, seen = flat_gradients(rank.params), []
        for _ in range(3):
            flat.zero_()
            reduced(rank)
            flat.mul_(0.5)
            seen.append(gradients(rank.plain))
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    assert_exact(on_ranks(way, body), oracle(scale=0.5))
