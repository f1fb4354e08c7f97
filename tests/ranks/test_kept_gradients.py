# SPDX-License-Identifier: Apache-2.0
"""A gradient that somebody still holds is not written again; the memory of others is used again.

Multi-task methods keep a list of gradients and combine it by hand.
"""

import pytest
import torch

from harness import assert_same, gradients
from ranks.programs import X, Y
from ranks.test_replicate_exact import weights
from ranks.ways import assert_exact, built, every_way, mean_square, momentum, on_ranks, our_buckets

PARTS = (slice(0, 8), slice(8, 12))


def size_of(model, part):
    """Another task than `mean_square`, and of another gradient."""
    return (model(X[part]) * Y[part]).sum(dim=1).mean() * 3


TASKS = (mean_square, size_of)


def in_graph(gradient):
    """A graph has saved the gradient; what it computes later shows whether it still is that."""
    factor = torch.ones_like(gradient, requires_grad=True)
    saved = (factor * gradient).sum()
    return lambda: torch.autograd.grad(saved, [factor], retain_graph=True)[0]


def always(held):
    return lambda: held


HOLDS = {
    "itself": always,
    "a view": lambda gradient: always(gradient.view(-1)),
    "a row": lambda gradient: always(gradient[:1]),
    "detached": lambda gradient: always(gradient.detach()),
    "data": lambda gradient: always(gradient.data),
    "numpy": lambda gradient: always(gradient.numpy()),
    "a graph": in_graph,
}


def driven(rank, task, part):
    rank.sync.backward(task(rank.model, part), weight=part.stop - part.start)


def first_values(held, name):
    """What is held now, as numbers."""
    return {"held": torch.as_tensor(held()).detach().clone().reshape(-1)}


def held_over_two_backwards(way, hold, **options):
    def body(rank):
        part = PARTS[rank.number]
        driven(rank, mean_square, part)
        kept = {name: HOLDS[hold](p.grad) for name, p in rank.plain.named_parameters()}
        before = {name: first_values(held, name)["held"] for name, held in kept.items()}
        rank.optimizer.zero_grad(set_to_none=True)
        driven(rank, size_of, part)
        second = gradients(rank.plain)
        after = {name: first_values(held, name)["held"] for name, held in kept.items()}
        assert_same(after, before, tolerance=0.0)
        return [second]

    true = built()
    size_of(true, slice(None)).backward()
    assert_exact(on_ranks(way, body, **options), [gradients(true)])


@pytest.mark.sampled
@every_way
@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_what_is_held_stays_as_it_was(way, hold, cap_mb):
    held_over_two_backwards(way, hold, bucket_cap_mb=cap_mb)


def combined(first, second):
    """PCGrad's rule: of two that point against each other, what is across the other one."""
    dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
    if dot >= 0:
        return [a + b for a, b in zip(first, second, strict=True)]
    one = sum((a * a).sum() for a in first)
    two = sum((b * b).sum() for b in second)
    return [a - dot / two * b + b - dot / one * a for a, b in zip(first, second, strict=True)]


def trained(model, optimizer, backward):
    """Three steps; `backward(task)` leaves a task's gradient."""
    seen = []
    for _ in range(3):
        kept = []
        for task in TASKS:
            optimizer.zero_grad(set_to_none=True)
            backward(task)
            kept.append([param.grad for param in model.parameters()])
        for param, gradient in zip(model.parameters(), combined(*kept), strict=True):
            param.grad = gradient
        seen.append(gradients(model))
        optimizer.step()
    return [*seen, weights([model])]


@every_way
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_combined_by_hand_and_stepped_with(way, cap_mb):
    def body(rank):
        part = PARTS[rank.number]
        return trained(rank.plain, rank.optimizer, lambda task: driven(rank, task, part))

    true = built()
    expected = trained(true, momentum(true), lambda task: task(true, slice(None)).backward())
    assert_exact(on_ranks(way, body, bucket_cap_mb=cap_mb), expected)


@our_buckets
@pytest.mark.parametrize("set_to_none", [True, False])
def test_memory_that_nobody_holds_is_used_again(way, set_to_none):
    def body(rank):
        places = []
        for _ in range(4):
            rank.optimizer.zero_grad(set_to_none=set_to_none)
            driven(rank, mean_square, PARTS[rank.number])
            rank.optimizer.step()
            places.append([param.grad.data_ptr() for param in rank.params])
        kept = [param.grad for param in rank.params]
        rank.optimizer.zero_grad(set_to_none=True)
        driven(rank, mean_square, PARTS[rank.number])
        others = [param.grad.data_ptr() for param in rank.params]
        del kept
        return places, others

    for places, others in on_ranks(way, body):
        assert places == places[:1] * 4
        assert not set(others) & set(places[0])


@our_buckets
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_gradients_that_no_rank_adds_to_may_be_changed_after_the_round(way, cap_mb):
    """`reduce_pending` compares what earlier rounds have left; what follows is the user's."""

    def steps(params, optimizer, backward, follow):
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            backward() if step % 2 == 0 else follow()
            params[0].grad.add_(params[0].detach(), alpha=0.1)
            optimizer.step()

    def body(rank):
        sync = rank.sync
        steps(
            rank.params,
            rank.optimizer,
            lambda: driven(rank, mean_square, PARTS[rank.number]),
            sync.reduce_pending,
        )
        return [weights([rank.plain])]

    true = built()
    plain = lambda: mean_square(true).backward()  # noqa: E731
    steps(list(true.parameters()), momentum(true), plain, lambda: None)
    assert_exact(on_ranks(way, body, bucket_cap_mb=cap_mb), [weights([true])])


@every_way
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_what_is_held_within_a_window_becomes_the_steps_gradient(way, cap_mb):
    """As in one process, where the next backward of the window adds to the tensor that is held."""

    def body(rank):
        part = PARTS[rank.number]
        with rank.sync.no_sync():
            driven(rank, mean_square, part)
        held = {name: p.grad for name, p in rank.plain.named_parameters()}
        driven(rank, size_of, part)
        return [gradients(rank.plain), {name: grad.clone() for name, grad in held.items()}]

    true = built()
    (mean_square(true) / 2).backward()
    held = {name: p.grad for name, p in true.named_parameters()}
    (size_of(true, slice(None)) / 2).backward()
    assert_exact(on_ranks(way, body, bucket_cap_mb=cap_mb), [gradients(true), held])
