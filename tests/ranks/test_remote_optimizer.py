# SPDX-License-Identifier: Apache-2.0
"""What loops do with an optimizer, where its steps happen at a parameter server."""

import copy
import time

import pytest
import torch
from tests.procs.odd_optimizers import SAM, Lookahead, OfTwoKinds
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import lockstep
from harness import assert_same, outcomes, reset
from lockstep.errors import (
    ConfigurationError,
    GradientNotReducedError,
    NotAvailableError,
    NotPicklableError,
    PeerLostError,
    ReplicasDifferError,
)
from lockstep.sync import ParameterServerSync
from lockstep.sync.optimizer_inspection import load_state, optimizers_with_state
from ranks.programs import X, Y, mlp, squared
from ranks.served import serve_ranks, server
from ranks.test_replicate_exact import weights

PARTS = (slice(0, 7), slice(7, 12))


class OneProcess:
    """The oracle behind the interface of a sync."""

    def backward(self, loss, weight):
        loss.backward()

    def detach(self):
        """Nothing to take off."""


def run(loop, size=2):
    """``loop(model, attach, part, rank)`` on ranks, and the weights that it left on each."""
    models = [reset(mlp(), seed=7) for _ in range(size)]

    def one_rank(group, address):
        made = []

        def attach(*optimizers):
            made.append(ParameterServerSync([models[group.rank]], optimizers, group, address))
            return made[-1]

        part = PARTS[group.rank] if size == 2 else slice(None)
        try:
            loop(models[group.rank], attach, part, group.rank)
            return weights(models[group.rank : group.rank + 1])
        finally:
            for sync in made:
                sync.detach()

    return serve_ranks(size, one_rank)


def assert_as_one_process(loop):
    model = reset(mlp(), seed=7)
    loop(model, lambda *optimizers: OneProcess(), slice(None), 0)
    for size in (1, 2):
        for result in run(loop, size):
            if isinstance(result, BaseException):
                raise result
            assert_same(result, weights([model]))


def steps(model, sync, optimizer, part, count=4, prepare=None, after=None):
    for step in range(count):
        optimizer.zero_grad()
        loss = squared(model)(X[part] * (step + 1), Y[part])
        sync.backward(loss, weight=len(X[part]))
        if prepare is not None:
            prepare()
        optimizer.step()
        if after is not None:
            after()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("kind", ["step", "one_cycle"])
def test_schedulers_reach_the_owner(kind, before):
    def schedule(optimizer):
        if kind == "step":
            return StepLR(optimizer, 1, gamma=0.5)
        return OneCycleLR(optimizer, max_lr=0.2, total_steps=10)  # momentum too

    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        scheduler = schedule(optimizer) if before else None
        sync = attach(optimizer)
        scheduler = scheduler or schedule(optimizer)
        steps(model, sync, optimizer, part, after=scheduler.step)

    assert_as_one_process(loop)


def test_what_the_loop_does_to_gradients_and_weights_counts():
    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        sync = attach(optimizer)

        def clamp():
            for param in model.parameters():
                param.data.clamp_(-0.3, 0.3)

        def clip():
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        steps(model, sync, optimizer, part, prepare=clip, after=clamp)
        with torch.no_grad():
            # A permutation has every sum of the old values.
            model[0].weight.copy_(model[0].weight.flip(0))
        steps(model, sync, optimizer, part, count=2)

    assert_as_one_process(loop)


def test_a_scaler_skips_the_same_steps():
    def loop(model, attach, part, rank):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True, foreach=False)
        sync = attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = squared(model)(X[part], Y[part])
            bad = torch.inf if step == 1 and rank == 0 else 1.0
            sync.backward(scaler.scale(loss * bad), weight=len(X[part]))
            scaler.step(optimizer)
            scaler.update()

    assert_as_one_process(loop)


def test_a_closure_is_evaluated_here():
    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        sync = attach(optimizer)

        def closure():
            optimizer.zero_grad()
            loss = squared(model)(X[part], Y[part])
            sync.backward(loss, weight=len(X[part]))
            return loss

        for _ in range(3):
            assert optimizer.step(closure).item() > 0

    assert_as_one_process(loop)


def test_layers_that_are_added_to_the_optimizer_later():
    def loop(model, attach, part, rank):
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01)
        sync = attach(optimizer)
        steps(model, sync, optimizer, part, count=2)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.001})
        optimizer.load_state_dict(optimizer.state_dict())
        steps(model, sync, optimizer, part, count=2)

    assert_as_one_process(loop)


def test_the_state_is_the_owners_and_can_be_loaded():
    def loop(model, attach, part, rank):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
        sync = attach(optimizer)
        steps(model, sync, optimizer, part, count=2)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        steps(model, sync, optimizer, part, count=2)
        assert len(kept[1]["state"]) == 4
        assert kept[1]["state"][0]["step"] == 2
        assert kept[1]["state"][0]["exp_avg"].dtype == torch.float64
        optimizer.param_groups[0]["lr"] = 1.0
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        assert optimizer.param_groups[0]["lr"] == 0.01
        steps(model, sync, optimizer, part, count=3)

    assert_as_one_process(loop)


def test_an_optimizer_that_has_stepped_before_goes_on():
    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        steps(model, OneProcess(), optimizer, slice(None), count=2)
        sync = attach(optimizer)
        steps(model, sync, optimizer, part, count=2)

    assert_as_one_process(loop)


class Searching(torch.optim.SGD):
    """An optimizer that finds its learning rate itself, and counts in its groups."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["found"] = group.get("found", 0) + 1
            group["lr"] *= 1 + 1 / group["found"]


def test_settings_that_an_optimizer_changes_itself():
    def loop(model, attach, part, rank):
        optimizer = Searching(model.parameters(), lr=0.01)
        sync = attach(optimizer)
        steps(model, sync, optimizer, part)
        assert optimizer.param_groups[0]["found"] == 4
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        kept = copy.deepcopy(optimizer.state_dict())
        steps(model, sync, optimizer, part)
        optimizer.load_state_dict(kept)
        steps(model, sync, optimizer, part)

    assert_as_one_process(loop)


class Halving(torch.optim.SGD):
    """An optimizer with state in attributes, which a pickle leaves out."""

    def __init__(self, params, lr, fails_at=99):
        super().__init__(params, lr)
        self.factor, self.fails_at = 1.0, fails_at

    def step(self, closure=None):
        self.fails_at -= 1
        if self.fails_at == 0:
            raise ArithmeticError("no further")
        self.factor /= 2
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"] * self.factor)


def test_an_optimizer_of_ones_own():
    def loop(model, attach, part, rank):
        optimizer = Halving(model.parameters(), lr=0.1)
        steps(model, attach(optimizer), optimizer, part)

    assert_as_one_process(loop)


def states_of(members):
    return copy.deepcopy([each.state_dict() for each in members])


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Lookahead(torch.optim.Adam(params, lr=0.01)),
        OfTwoKinds,
    ],
    ids=["one", "two"],
)
def test_the_state_of_an_optimizer_within_another_one_is_the_owners(make):
    def loop(model, attach, part, rank):
        optimizer = make(model.parameters())
        sync = attach(optimizer)
        scheduler = StepLR(optimizer, 1, gamma=0.7)
        members = [model, scheduler, *optimizers_with_state([optimizer])]
        assert len(members) > 3
        early = states_of(members)
        steps(model, sync, optimizer, part, count=3, after=scheduler.step)
        kept = states_of(members)
        assert sum(len(state["state"]) for state in kept[3:]) == 4
        for state in (early, kept):
            steps(model, sync, optimizer, part, count=1, after=scheduler.step)
            for each, own in zip(members, copy.deepcopy(state), strict=True):
                each.load_state_dict(own) if each is model else load_state(each, own)
        steps(model, sync, optimizer, part, count=3, after=scheduler.step)

    assert_as_one_process(loop)


def test_an_optimizer_within_another_one_may_have_attributes_and_a_state_before():
    def loop(model, attach, part, rank):
        optimizer = Lookahead(Halving(model.parameters(), lr=0.1))
        other = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01))
        steps(model, OneProcess(), other, slice(None), count=2)
        sync = attach(optimizer, other)
        steps(model, sync, optimizer, part)
        steps(model, sync, other, part)

    assert_as_one_process(loop)


def test_an_optimizer_within_another_one_that_the_loop_steps_itself_has_its_state_here():
    def loop(model, attach, part, rank):
        def make(groups):
            return torch.optim.Adam(groups, lr=0.01)

        optimizer = SAM(model.parameters(), make)
        sync = attach(optimizer)
        for step in range(4):
            for name in ("first_step", "second_step"):
                sync.backward(squared(model)(X[part], Y[part]), weight=len(X[part]))
                getattr(optimizer, name)()
            if step == 1:
                kept = states_of([model, optimizer.base])
                assert len(kept[1]["state"]) == 4
            if step == 2:
                model.load_state_dict(kept[0])
                load_state(optimizer.base, kept[1])

    assert_as_one_process(loop)


def test_an_error_of_the_optimizer_arrives_on_every_rank():
    def loop(model, attach, part, rank):
        optimizer = Halving(model.parameters(), lr=0.1, fails_at=2)
        steps(model, attach(optimizer), optimizer, part)

    for result in run(loop):
        assert isinstance(result, ArithmeticError)
        assert str(result) == "no further"


def test_detaching_makes_the_optimizer_an_ordinary_one():
    model = reset(mlp(), seed=7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    before = vars(optimizer).keys() - {"_opt_called"}

    def loop(_, attach, part, rank):
        twin = reset(mlp(), seed=7)
        theirs = torch.optim.Adam(twin.parameters(), lr=0.01, fused=True)
        steps(twin, OneProcess(), theirs, part, count=4)
        return weights([twin])

    with server(1) as address:
        sync = ParameterServerSync([model], [optimizer], lockstep.group.Group(None), address)
        assert optimizer.state == {}
        steps(model, sync, optimizer, slice(None), count=2)
        sync.detach()
        sync.detach()
    assert vars(optimizer).keys() - {"_opt_called"} == before
    assert optimizer._step_supports_amp_scaling
    for step in (2, 3):  # as `steps` would have gone on
        optimizer.zero_grad()
        squared(model)(X * (step + 1), Y).backward()
        optimizer.step()
    assert_same(weights([model]), loop(None, None, slice(None), 0))


class SlowToSend(torch.optim.SGD):
    """Rank 0, which sends it to the server, comes later than its peers."""

    def __getstate__(self):
        time.sleep(0.2)
        return super().__getstate__()


class NotToSend(SlowToSend):
    def __getstate__(self):
        super().__getstate__()
        raise KeyError("a lock")


def test_a_rank_that_asks_for_a_state_before_rank_0_has_handed_it_over_waits():
    def loop(model, attach, part, rank):
        optimizer = SlowToSend(model.parameters(), lr=0.05, momentum=0.9)
        optimizer.state[model[0].weight]["momentum_buffer"] = torch.ones_like(model[0].weight)
        sync = attach(optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(model, sync, optimizer, part, count=2)

    assert_as_one_process(loop)


def test_a_rank_that_waits_for_a_state_is_freed_when_rank_0_fails():
    def loop(model, attach, part, rank):
        optimizer = NotToSend(model.parameters(), lr=0.05)
        attach(optimizer)
        optimizer.state_dict()

    first, second = run(loop)
    assert isinstance(first, NotPicklableError)
    assert isinstance(second, PeerLostError)


def test_what_cannot_step_elsewhere_is_refused():
    def lbfgs(model, attach, part, rank):
        attach(torch.optim.LBFGS(model.parameters()))

    def mixed(model, attach, part, rank):
        lockstep.local(model[0].weight)
        attach(sgd(model))

    def stranger(model, attach, part, rank):
        optimizer = sgd(model)
        sync = attach(optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(X.clone())]})
        steps(model, sync, optimizer, part)

    def tied(model, attach, part, rank):
        model[2].bias.data = model[0].bias.data[1:4]
        attach(sgd(model))

    refused = ((lbfgs, "within a step"), (mixed, "alone"), (stranger, "does not know"))
    for loop, words in (*refused, (tied, "`0.bias` and `2.bias`")):
        for result in [*run(loop, 1)]:
            assert isinstance(result, NotAvailableError), result
            assert words in str(result)
            assert "LS003" in str(result)


def test_several_ranks_without_a_server_are_refused():
    def one_rank(group):
        model = mlp()
        ParameterServerSync([model], [sgd(model)], group, None)

    for result in outcomes(2, one_rank):
        assert isinstance(result, ConfigurationError)


def test_an_optimizer_of_local_parameters_stays_here():
    def loop(model, attach, part, rank):
        lockstep.local(model[0])
        here, there = sgd(model[0]), sgd(model[2])
        sync = attach(here, there)
        optimizer_steps = here.step, there.step
        steps(model, sync, there, part, prepare=optimizer_steps[0])
        assert len(here.state) == 2
        assert there.state == {}

    for result in run(loop):
        assert not isinstance(result, BaseException), result


def test_another_learning_rate_on_one_rank_is_refused_on_all():
    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        sync = attach(optimizer)
        optimizer.param_groups[0]["lr"] = 0.05 + 0.1 * rank
        steps(model, sync, optimizer, part)

    for result in run(loop):
        assert isinstance(result, ReplicasDifferError)
        assert "rank 1 against rank 0" in str(result)


def test_a_step_on_one_rank_alone_is_refused_on_all():
    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        sync = attach(optimizer)
        steps(model, sync, optimizer, part, count=1)
        for _ in range(2):
            sync.backward(squared(model)(X[part], Y[part]), weight=1)
            if rank == 0:
                optimizer.step()

    for result in run(loop):
        assert isinstance(result, GradientNotReducedError)
        assert "rank 0: a step of optimizer 0; rank 1: a reduction" in str(result)


def test_a_gradient_that_was_assigned_by_hand_is_refused_before_it_is_sent():
    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        attach(optimizer)
        found = torch.autograd.grad(squared(model)(X[part], Y[part]), list(model.parameters()))
        for param, grad in zip(model.parameters(), found, strict=True):
            param.grad = grad
        optimizer.step()

    for result in run(loop):
        assert isinstance(result, GradientNotReducedError)


@pytest.mark.parametrize("where", ["backward", "step"])
def test_a_rank_that_goes_away_keeps_nobody_waiting(where):
    def loop(model, attach, part, rank):
        optimizer = sgd(model)
        sync = attach(optimizer)
        steps(model, sync, optimizer, part, count=1)
        if where == "step":
            sync.backward(squared(model)(X[part], Y[part]), weight=1)
        if rank == 1:
            raise KeyError("gone")
        if where == "step":
            optimizer.step()
        # Straight to the server: through the group a peer's end would be noticed too.
        rounds = sync._rounds
        sync._sum_at_server(rounds.attached_group(), rounds.transport.reducer.layout.buckets[0])

    one, other = run(loop)
    assert isinstance(one, PeerLostError)
    assert "parameter server" in str(one) or "has left" in str(one)
    assert isinstance(other, KeyError)
