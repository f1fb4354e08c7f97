# SPDX-License-Identifier: Apache-2.0
"""Parameters that a program freezes between forward and backward get no gradient from it.

Autograd runs their hooks all the same, and those of the last layer come first of all. What a window
has trained before it froze it is reduced with the rest, also where it was frozen from the first.
"""

import pytest
import torch

from harness import assert_same, gradients
from lockstep.sync import replicate
from ranks.programs import X
from ranks.test_replicate_exact import weights
from ranks.ways import assert_exact, built, mean_square, momentum, on_ranks, our_buckets, refused

HALVES = slice(0, 6), slice(6, 12)


def oracle(frozen):
    """One process, in which a half's backward leaves out the layers that `frozen` has of it."""
    true, seen = built(), []
    optimizer = momentum(true)
    for _ in range(3):
        optimizer.zero_grad()
        for number, half in enumerate(HALVES):
            loss = mean_square(true.requires_grad_(True), half) / len(HALVES)
            for layer in frozen.get(number, ()):
                true[layer].requires_grad_(False)
            loss.backward()
        seen.append(gradients(true))
        optimizer.step()
    return [*seen, weights([true])]


def steps(rank, frozen, *, driven):
    for _ in range(3):
        rank.optimizer.zero_grad()
        loss = mean_square(rank.plain.requires_grad_(True), HALVES[rank.number])
        for layer in frozen.get(rank.number, ()):
            rank.plain[layer].requires_grad_(False)
        if driven:
            rank.sync.backward(loss, weight=6)
        else:
            loss.backward()
        yield
        rank.optimizer.step()


@our_buckets
@pytest.mark.parametrize("cap_mb", [25, 1e-5])
@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize(
    "frozen", [{0: [2], 1: [2]}, {1: [2]}, {0: [2], 1: [0]}], ids=["all", "one", "others"]
)
def test_as_in_one_process(way, frozen, driven, cap_mb):
    def body(rank):
        seen = [gradients(rank.plain) for _ in steps(rank, frozen, driven=driven)]
        return [*seen, weights([rank.plain])]

    true = oracle(frozen)
    assert (true[0]["0.2.weight"] is None) == (len(frozen) == 2 and frozen[1] == [2])
    assert_exact(on_ranks(way, body, bucket_cap_mb=cap_mb), true)


@our_buckets
@pytest.mark.parametrize("driven", [False, True])
def test_a_backward_that_reaches_nothing_but_frozen_parameters_counts(way, driven):
    """Its rank brings zeros: half of the gradient is the others', and not all of it."""
    frozen = {1: [0, 2]}

    def body(rank):
        seen = [gradients(rank.plain) for _ in steps(rank, frozen, driven=driven)]
        return [*seen, weights([rank.plain])]

    assert_exact(on_ranks(way, body), oracle(frozen))


def trained_in_turn(model, backwards, step, trains):
    """Two losses, for one of which the first layer is trained, and frozen for the other."""
    trained, frozen = backwards
    for _ in range(3):
        model.zero_grad()
        model[0].requires_grad_(True)
        if trains:
            trained()
        model[0].requires_grad_(False)
        frozen()
        yield gradients(model)
        step()


@our_buckets
@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize("closes", ["a backward", "nothing"])
@pytest.mark.parametrize("training", [(0, 1), (1,)], ids=["all", "one"])
def test_what_a_window_trains_before_it_freezes_it_is_reduced(way, driven, closes, training):
    """As a discriminator, which a program freezes before it attaches, and for the generator."""

    def body(rank):
        half = HALVES[rank.number]

        def backward():
            loss = mean_square(rank.plain, half)
            rank.sync.backward(loss, weight=6) if driven else loss.backward()

        def paused():
            with rank.sync.no_sync():
                backward()

        last = backward if closes == "a backward" else rank.sync.reduce_pending
        trains = rank.number in training
        seen = trained_in_turn(rank.plain, (paused, last), rank.optimizer.step, trains)
        return [*seen, weights([rank.plain])]

    true = built()
    optimizer = momentum(true)
    closing = (0, 1) if closes == "a backward" else ()
    # By weight each backward counts, else each rank that has run one.
    share = len(training) + len(closing) if driven else len({*training, *closing})

    def summed(ranks):
        return lambda: [(mean_square(true, HALVES[r]) / share).backward() for r in ranks]

    both = summed(training), summed(closing)
    expected = list(trained_in_turn(true, both, optimizer.step, trains=True))
    got = on_ranks(way, body, before=lambda plain: plain[0].requires_grad_(False))
    assert_exact(got, [*expected, weights([true])])


@pytest.mark.parametrize("frozen", [{0: [2], 1: [2]}, {1: [2]}], ids=["all", "one"])
def test_torchs_ddp_waits_for_their_gradients_and_is_refused(frozen):
    refused("ddp", "LS101", lambda rank: list(steps(rank, frozen, driven=False)))


def test_what_accumulates_nothing_reaches_no_frozen_parameter():
    """Or it would be taken for a backward that the ranks have to reduce."""
    model, x = built(), X.clone().requires_grad_()
    sync = replicate(model)
    loss = model(x).square().mean()
    model[2].requires_grad_(False)
    torch.autograd.grad(loss, [x, model[0].weight], retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    assert sync.rounds == 0
    assert all(param.grad is None for param in model.parameters())
    loss.backward()
    assert sync.rounds == 1
    sync.detach()
    true = built()
    true(X).square().mean().backward()
    assert_same(gradients(model[0]), gradients(true[0]))
    assert_same(gradients(model[2]), {"0.weight": None, "0.bias": None})
