# SPDX-License-Identifier: Apache-2.0
"""The weight that ranks compare where gradients cross is the one that is applied afterwards."""

import pytest
import torch
from torch import nn

import lockstep
from harness import assert_same, gradients, outcomes, run_ranks
from lockstep.errors import CrossedWeightsError
from ranks.contrastive import LEFT, RIGHT, clip, towers

SIZES = [8, 16]


def of_rank(group, tensor):
    start = sum(SIZES[: group.rank])
    return tensor[start : start + SIZES[group.rank]]


def loss_of(model, group, function="info_nce"):
    """The loss of CLIP, over the rows of all ranks."""
    a, b = model(of_rank(group, LEFT), of_rank(group, RIGHT))
    if function == "info_nce":
        return lockstep.info_nce(a, b, model.scale, group=group)
    a, b = (lockstep.gather(x, group=group) for x in (a, b))
    return clip(a, b, model.scale)


def of_one_process():
    true = towers()
    clip(*true(LEFT, RIGHT), true.scale).backward()
    return gradients(true)


def assigned(model, loss):
    params = [each for each in model.parameters() if each is not model.head.weight]
    found = torch.autograd.grad(loss, params, allow_unused=True)
    for param, gradient in zip(params, found, strict=True):
        param.grad = gradient


WAYS = {"backward": lambda model, loss: loss.backward(), "autograd.grad": assigned}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("function", ["info_nce", "gather"])
def test_gradients_that_have_crossed_are_averaged_with_equal_weights_only(function, way):
    """With unequal ones the encoder's error was that of ADR 0001's second column."""
    replicas = [towers() for _ in SIZES]

    def body(group, weight):
        model = replicas[group.rank]
        model.zero_grad()
        way(model, loss_of(model, group, function))
        lockstep.average_gradients(model, weight=weight, group=group)
        return gradients(model)

    for found in run_ranks(2, lambda group: body(group, None)):
        assert_same(found, of_one_process())
    for found in run_ranks(2, lambda group: body(group, 5)):
        assert_same(found, of_one_process())
    for weights in (SIZES, [1, 0]):
        refused = outcomes(2, lambda group, weights=weights: body(group, weights[group.rank]))
        assert [type(each) for each in refused] == [CrossedWeightsError] * 2, refused
        listed = f"{weights[0]} on rank 0, {weights[1]} on rank 1"
        assert all(listed in str(each) for each in refused)


def test_what_crossed_before_a_step_or_in_another_model_does_not_count():
    """Phases of one training, and two models of which one's gradients alone cross ranks."""
    replicas = [(towers(), nn.Linear(5, 2).double()) for _ in SIZES]
    replicas[1][1].load_state_dict(replicas[0][1].state_dict())

    def body(group):
        model, other = replicas[group.rank]
        loss_of(model, group).backward()
        other(of_rank(group, LEFT)).square().mean().backward()
        lockstep.average_gradients(other, weight=SIZES[group.rank], group=group)
        found = gradients(other)
        model.zero_grad()
        model.left(of_rank(group, LEFT)).square().mean().backward()
        lockstep.average_gradients(model, weight=SIZES[group.rank], group=group)
        return found, gradients(model)

    results = run_ranks(2, body)
    model, other = towers(), nn.Linear(5, 2).double()
    other.load_state_dict(replicas[0][1].state_dict())
    other(LEFT).square().mean().backward()
    model.left(LEFT).square().mean().backward()
    for of_other, of_model in results:
        assert_same(of_other, gradients(other))
        assert_same(of_model, gradients(model))


@pytest.mark.parametrize("first", ["left", "right"])
def test_of_two_towers_the_second_has_crossed_too_when_the_first_has_stepped(first):
    replicas = [towers() for _ in SIZES]
    second = {"left": "right", "right": "left"}[first]

    def body(group):
        model = replicas[group.rank]
        loss = loss_of(model, group)
        loss.backward()
        lockstep.average_gradients(getattr(model, first), group=group)
        torch.optim.SGD(getattr(model, first).parameters(), lr=0.1).step()
        lockstep.average_gradients(getattr(model, second), weight=SIZES[group.rank], group=group)

    refused = outcomes(2, body)
    assert [type(each) for each in refused] == [CrossedWeightsError] * 2, refused


@pytest.mark.parametrize("weights", [SIZES, [5, 5]], ids=["unequal", "equal"])
def test_a_weight_that_is_delivered_after_the_forward_is_the_one_compared(weights):
    replicas = [towers() for _ in SIZES]

    def body(group):
        model = replicas[group.rank]
        sync = lockstep.replicate(model, group=group)
        try:
            loss = loss_of(model, group)
            sync.set_delivered_weight(weights[group.rank])
            loss.backward()
        finally:
            sync.detach()
        return gradients(model)

    if weights == SIZES:
        refused = outcomes(2, body)
        assert [type(each) for each in refused] == [CrossedWeightsError] * 2, refused
        assert all("8 at the reduction on rank 0, 16 at" in str(each) for each in refused)
        return
    for found in run_ranks(2, body):
        assert_same(found, of_one_process())
