# SPDX-License-Identifier: Apache-2.0
"""Equal gradients are not enough: the steps, and the weights at the start, are equal too."""

import pytest
import torch
from tests.procs.odd_optimizers import Lookahead
from torch import nn

from harness import reset, rows, run_ranks
from lockstep.errors import GradientNotReducedError, ReplicasDifferError, UnknownParameterError
from lockstep.operator import Options, RankContext
from lockstep.operator.registration import build_training_parts
from lockstep.operator.training_parts import SyncOptions
from lockstep.sync import local, replicate

X = rows(6, 4, seed=1)


def net():
    return reset(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), seed=2)


def registers(make_optimizer, make_scheduler=None):
    """Two ranks that register what `make_optimizer(model, rank)` returns."""
    replicas = [net() for _ in range(2)]

    def one(group):
        model = replicas[group.rank]
        optimizer = make_optimizer(model, group.rank)
        registered = build_training_parts(
            RankContext(
                world_rank=group.rank,
                world_size=2,
                group=group,
                options=Options(scheduler_step_freq="epoch"),
            ),
            models=model,
            optimizers=optimizer,
            criterion=None,
            schedulers=make_scheduler and make_scheduler(optimizer, group.rank),
            sync_options=SyncOptions(buffers="manual", averages=True),
        )
        registered.sync.detach()

    run_ranks(2, one)


def sgd(params, **settings):
    return torch.optim.SGD(params, **{"lr": 0.1, **settings})


@pytest.mark.parametrize(
    ("make_optimizer", "named"),
    [
        (lambda model, rank: sgd(model.parameters(), lr=0.1 + rank), "'lr': '1.1'"),
        (lambda model, rank: sgd(model.parameters(), momentum=0.9 * rank), "'momentum': '0.9'"),
        (lambda model, rank: sgd(list(model.parameters())[rank:]), "0.0.weight"),
        (lambda model, rank: sgd(list(model.parameters())[:: 1 - 2 * rank]), "0.1.bias"),
        (lambda model, rank: [sgd(model.parameters()) for _ in range(rank + 1)], "nothing more"),
        (
            lambda model, rank: [torch.optim.Adam, torch.optim.AdamW][rank](model.parameters()),
            "AdamW",
        ),
    ],
    ids=["rate", "momentum", "fewer", "order", "number", "kind"],
)
def test_optimizers_that_differ_are_refused_on_every_rank(make_optimizer, named):
    def checked(model, rank):
        return make_optimizer(model, rank)

    with pytest.raises(ReplicasDifferError, match="same optimizers") as caught:
        registers(checked)
    assert named in str(caught.value)


def stepped(model, optimizer, factor=1.0):
    """`optimizer` with a state, and the weights of before."""
    before = [param.detach().clone() for param in model.parameters()]
    (model(X).square().mean() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for param, value in zip(model.parameters(), before, strict=True):
            param.copy_(value)
    return optimizer


@pytest.mark.parametrize(
    ("make_optimizer", "named"),
    [
        (
            lambda model, rank: stepped(model, sgd(model.parameters(), momentum=0.9), 1 + rank),
            "momentum_buffer",
        ),
        (
            lambda model, rank: (
                torch.optim.Adam(model.parameters())
                if rank
                else stepped(model, torch.optim.Adam(model.parameters()))
            ),
            "nothing more",
        ),
        (
            lambda model, rank: Lookahead(
                stepped(model, sgd(model.parameters(), momentum=0.9), 1 + rank)
            ),
            "momentum_buffer",
        ),
    ],
    ids=["values", "on one rank alone", "within another one"],
)
def test_states_that_differ_are_refused_on_every_rank(make_optimizer, named):
    """Loaded on rank 0 alone, or from other files."""
    with pytest.raises(ReplicasDifferError, match="state of `") as caught:
        registers(make_optimizer)
    assert named in str(caught.value)


def test_states_that_are_the_same_may_be_there_before():
    registers(lambda model, rank: stepped(model, torch.optim.Adam(model.parameters())))


def test_a_state_of_what_is_local_may_differ():
    def own_state(model, rank):
        local(model)
        return stepped(model, sgd(model.parameters(), momentum=0.9), 1 + rank)

    registers(own_state)


def test_schedulers_that_differ_are_refused():
    def decay(optimizer, rank):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5 / (rank + 1))

    with pytest.raises(ReplicasDifferError, match=r"0\.25"):
        registers(lambda model, rank: sgd(model.parameters()), decay)


def test_what_is_local_by_design_may_differ():
    def own_rate(model, rank):
        local(model[0])
        shared = {"params": model[1].parameters(), "lr": 0.1}
        return torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.1 + rank}, shared])

    registers(own_rate)


def registered_on_two_ranks(body):
    replicas = [net() for _ in range(2)]

    def one(group):
        model = replicas[group.rank]
        optimizer = sgd(model.parameters())
        run = build_training_parts(
            RankContext(world_rank=group.rank, world_size=2, group=group),
            models=model,
            optimizers=optimizer,
            criterion=None,
            schedulers=None,
            sync_options=SyncOptions(buffers="manual", averages=True),
        )
        try:
            body(run, model, optimizer)
        finally:
            run.sync.detach()

    run_ranks(2, one)


def test_a_layer_that_was_replaced_after_registering_is_named():
    def body(run, model, optimizer):
        run.refuse_added_parameters()
        model[1] = nn.Linear(3, 2).double()
        with pytest.raises(UnknownParameterError, match=r"`1\.weight` \(2, 3\), `1\.bias`"):
            run.refuse_added_parameters()
        local(model[1])
        run.refuse_added_parameters()

    registered_on_two_ranks(body)


def test_parameters_exchanged_inside_an_optimizer_are_noticed():
    def body(run, model, optimizer):
        model(X).mean().backward()
        optimizer.step()
        model[1] = nn.Linear(3, 2).double()
        optimizer.param_groups[0]["params"] = list(model.parameters())
        with pytest.raises(UnknownParameterError, match=r"`1\.weight`"):
            model(X).mean().backward()
        with pytest.raises(UnknownParameterError):
            optimizer.step()

    registered_on_two_ranks(body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_changed_on_one_rank_are_named(dtype):
    replicas = [net().to(dtype) for _ in range(3)]

    def one(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        sync.agree_on_values()
        if group.rank == 2:
            with torch.no_grad():
                model[1].bias[0] += 1
        try:
            with pytest.raises(ReplicasDifferError, match=r"rank 2 against rank 0") as caught:
                sync.agree_on_values()
        finally:
            sync.detach()
        return caught.value.details["got"]

    assert run_ranks(3, one) == ["`1.bias`"] * 3


@pytest.mark.parametrize("steps_of_rank_1", [[0, 0], [1, 2]], ids=["twice", "left out"])
def test_gradients_of_different_steps_never_meet(steps_of_rank_1):
    replicas = [net() for _ in range(2)]

    def one(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        try:
            with pytest.raises(GradientNotReducedError, match="the same round of the same step"):
                for step in [0, 1] if group.rank == 0 else steps_of_rank_1:
                    sync.begin_step(step)
                    model(X).mean().backward()
        finally:
            sync.detach()

    run_ranks(2, one)


def test_weights_that_drift_after_a_step_are_not_said_to_have_come_so():
    def one(group):
        model = net()
        sync = replicate(model, group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + group.rank))
        try:
            model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
            with pytest.raises(ReplicasDifferError, match="learning rate") as caught:
                sync.agree_on_values()
        finally:
            sync.detach()
        return caught.value.what

    assert run_ranks(2, one) == ["the ranks' weights differ"] * 2
