# SPDX-License-Identifier: Apache-2.0
"""Under torch's DDP: backwards that use a part of a model, and what the other ranks hear of it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import gradients, outcomes, reset
from lockstep.errors import GradientNotReducedError, LockstepError, UnknownParameterError
from lockstep.sync.ddp_sync import DDPSync
from ranks.ways import assert_exact


class Halves(nn.Module):
    """`left` for rows whose first feature is positive, `right` for the others."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.left(x) if x[0, 0] > 0 else self.right(x)


def on_two(body, build=Halves, **ddp_args):
    """The outcome on each rank of `body(group, model, sync)`."""
    replicas = [reset(build().double(), 3) for _ in range(2)]

    def one_rank(group):
        sync = DDPSync([replicas[group.rank]], group, ddp_args=ddp_args)
        try:
            return body(group, sync.models[0], sync)
        finally:
            sync.detach()

    return outcomes(2, one_rank)


def features(*firsts):
    rows = torch.ones(len(firsts), 4, dtype=torch.float64)
    rows[:, 0] = torch.tensor(firsts)
    return rows


def refusals(found):
    return [(type(error), error.what) for error in found]


def test_a_backward_that_leaves_half_a_small_model_is_refused_at_once():
    stepped = []

    def body(group, model, sync):
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(stepped.append)
        model(features(1.0)).sum().backward()

    found = on_two(body)
    what = "a backward left parameters without a gradient, and torch's DDP waits for them"
    assert refusals(found) == [(GradientNotReducedError, what)] * 2
    assert not stepped


def test_a_rank_that_follows_hears_that_a_backward_left_half_a_model():
    def body(group, model, sync):
        if group.rank == 0:
            model(features(1.0)).sum().backward()
        else:
            sync.reduce_pending()

    assert [type(error) for error in on_two(body)] == [GradientNotReducedError] * 2


def test_a_hook_whose_global_gradient_does_not_come_is_refused():
    def body(group, model, sync):
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: None)
        model.module(features(1.0)).sum().backward()

    found = on_two(body, lambda: nn.Linear(4, 3))
    what = "hooks wait for a global gradient that this backward does not bring"
    assert refusals(found) == [(GradientNotReducedError, what)] * 2


def test_a_replaced_parameter_that_one_rank_used_is_refused_on_both():
    def body(group, model, sync):
        left = model.module.left
        left.weight = nn.Parameter(left.weight.detach() * 0.5)
        model(features(1.0 - 2 * group.rank)).sum().backward()

    found = on_two(body, find_unused_parameters=True)
    assert [type(error) for error in found] == [UnknownParameterError] * 2


@pytest.mark.parametrize("drop", ["zero_grad", "reduce_pending", "forget_window"])
def test_layers_of_a_window_that_is_gone_are_not_taken_for_used(drop):
    def body(group, model, sync):
        with sync.no_sync():
            sync.backward(model(features(1.0)).sum(), weight=1)
        if drop == "reduce_pending":
            sync.reduce_pending()
        if drop == "forget_window":
            sync.forget_window()
        output = model(features(-1.0))
        model.zero_grad()
        sync.backward(output.sum(), weight=1)
        return [param.grad for param in model.module.parameters()]

    for grads in on_two(body, find_unused_parameters=True):
        assert grads[:2] == [None, None]
        assert torch.equal(grads[2], features(-1.0).expand(3, 4))


def test_layers_of_a_window_that_is_gone_get_no_gradient_in_another_models_backward():
    def body(group):
        net, judge = reset(Halves().double(), 3), reset(nn.Linear(3, 1).double(), 4)
        sync = DDPSync([net, judge], group, ddp_args={"find_unused_parameters": True})
        model, judging = sync.models
        with sync.no_sync():
            sync.backward(model(features(1.0)).sum(), weight=1)
        sync.reduce_pending()
        model.zero_grad()
        fake = model(features(-1.0))
        sync.backward(judging(fake.detach()).sum(), weight=1)
        in_between = [param.grad for param in net.parameters()]
        sync.backward(judging(fake).sum(), weight=1)
        sync.detach()
        return in_between, [param.grad is None for param in net.parameters()]

    for in_between, are_none in outcomes(2, body):
        assert in_between == [None] * 4
        assert are_none == [True, True, False, False]


def test_gradients_of_a_forward_outside_a_window_may_come_inside():
    def body(group, model, sync):
        loss = model(features(1.0)).sum()
        with sync.no_sync():
            loss.backward()
        model(features(1.0)).sum().backward()
        return model.module.weight.grad

    for grad in on_two(body, lambda: nn.Linear(4, 3)):
        assert torch.equal(grad, 2 * features(1.0).expand(3, 4))


SMALL = {"bucket_cap_mb": 1e-5}


@pytest.mark.parametrize("replaces", [(0, 1), (0,)])
@pytest.mark.parametrize("follows", [True, False])
def test_a_model_that_was_half_sent_when_its_backward_ended_is_refused_on_both(replaces, follows):
    """One bucket has left, and the peer waits for the other one."""

    def body(group, model, sync):
        if group.rank in replaces:
            first = model.module[0]
            first.weight = nn.Parameter(first.weight.detach() * 0.5)
        if group.rank == 1 and follows:
            sync.reduce_pending()
        else:
            model(features(1.0)).sum().backward()

    found = on_two(body, lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), **SMALL)
    assert [type(error) for error in found] == [UnknownParameterError] * 2


def test_a_layer_that_one_rank_alone_leaves_out_ends_on_both():
    """No rank follows: the other rank hears of it while it waits for the bucket."""

    def body(group, model, sync):
        model(features(1.0 - 2 * group.rank)).sum().backward()

    class Deep(Halves):
        def forward(self, x):
            return self.right(x) + (self.left(x) if x[0, 0] > 0 else 0)

    found = on_two(body, Deep, **SMALL)
    assert type(found[1]) is GradientNotReducedError
    assert isinstance(found[0], LockstepError)


def test_a_replaced_parameter_in_a_window_is_refused_on_both():
    def body(group, model, sync):
        left = model.module.left
        left.weight = nn.Parameter(left.weight.detach() * 0.5)
        with sync.no_sync():
            model(features(1.0 - 2 * group.rank)).sum().backward()
        sync.reduce_pending()

    found = on_two(body, find_unused_parameters=True)
    assert [type(error) for error in found] == [UnknownParameterError] * 2


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=True))


def test_a_checkpoint_inside_a_window_after_a_forward_outside_is_exact():
    """The forward outside is what DDP would wait for when the one under `no_sync` comes."""

    def body(group, model, sync):
        model(features(1.0))
        with sync.no_sync():
            model(features(1.0 + group.rank)).sum().backward()
        sync.reduce_pending()
        return gradients(model.module)

    true = reset(Checkpointed().double(), 3)
    (true(features(1.0, 2.0)).sum() / 2).backward()
    found = on_two(body, Checkpointed, find_unused_parameters=True)
    assert_exact([[one] for one in found], [gradients(true)])
