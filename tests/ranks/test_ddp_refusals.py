# SPDX-License-Identifier: Apache-2.0
"""What torch's DDP cannot reduce is refused before the optimizer steps, on every rank."""

import copy

import pytest
import torch
from torch import nn

from harness import gradients, outcomes, reset, run_ranks
from lockstep import local
from lockstep.errors import (
    ConfigurationError,
    GradientNotReducedError,
    MixedWeightsError,
    SparseGradientError,
    WeightError,
    WrongUseError,
)
from lockstep.group import Group
from lockstep.sync.ddp_sync import DDPSync
from ranks.programs import X, Y, mlp, sgd, squared
from ranks.wrapped_programs import Experts, Scaled


def refused(error, program, *, build=mlp, **ddp_args):
    """Run `program(sync, models, rank)` on two ranks: both raise `error`, no weight moves."""
    replicas = [[reset(m, 3) for m in as_list(build())] for _ in range(2)]
    before = [copy.deepcopy(modules) for modules in replicas]

    def one_rank(group):
        sync = DDPSync(replicas[group.rank], group, ddp_args=ddp_args)
        try:
            program(sync, sync.models, group.rank)
        finally:
            sync.detach()

    results = outcomes(2, one_rank)
    assert [type(result) for result in results] == [error, error], results
    for modules, untouched in zip(replicas, before, strict=True):
        for module, other in zip(modules, untouched, strict=True):
            for now, then in zip(module.parameters(), other.parameters(), strict=True):
                assert torch.equal(now, then)
    return results


def as_list(built):
    return built if isinstance(built, list) else [built]


def part(rank):
    return (X[:8], Y[:8]) if rank == 0 else (X[8:], Y[8:])


@pytest.mark.parametrize("way", ["driven", "plain"])
def test_a_forward_of_the_module_inside(way):
    def program(sync, models, rank):
        optimizer = sgd(*models)
        loss = squared(models[0].module)(*part(rank))
        sync.backward(loss, weight=8) if way == "driven" else loss.backward()
        optimizer.step()

    (error, _) = refused(GradientNotReducedError, program)
    assert "model.module" in str(error)
    assert error.code == "LS101"


def test_another_method_than_forward():
    class Two(nn.Sequential):
        def twice(self, x):
            return self(x) * 2

    def program(sync, models, rank):
        optimizer = sgd(*models)
        sync.backward(models[0].module.twice(part(rank)[0]).square().mean(), weight=1)
        optimizer.step()

    refused(GradientNotReducedError, program, build=lambda: Two(nn.Linear(4, 3)))


def test_gradients_assigned_by_hand():
    def program(sync, models, rank):
        optimizer = sgd(*models)
        params = list(models[0].parameters())
        found = torch.autograd.grad(squared(models[0])(*part(rank)), params)
        for param, gradient in zip(params, found, strict=True):
            param.grad = gradient
        optimizer.step()

    refused(GradientNotReducedError, program)


def test_a_second_backward_through_one_forward():
    def program(sync, models, rank):
        optimizer = sgd(*models)
        loss = squared(models[0])(*part(rank))
        sync.backward(loss, weight=1, retain_graph=True)
        sync.backward(loss, weight=1)
        optimizer.step()

    refused(GradientNotReducedError, program)


def test_two_forwards_and_then_their_backwards():
    def program(sync, models, rank):
        optimizer = sgd(*models)
        losses = [squared(models[0])(*part(rank)) for _ in range(2)]
        for loss in losses:
            sync.backward(loss, weight=1)
        optimizer.step()

    refused(GradientNotReducedError, program)


@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-4])
def test_a_layer_that_nobody_uses(bucket_cap_mb):
    def program(sync, models, rank):
        optimizer = sgd(*models, weight_decay=0.1)
        x, y = part(rank)
        loss = (models[0](x, torch.zeros(len(x))) - y).square().mean()
        sync.backward(loss, weight=len(x))
        optimizer.step()

    (error, _) = refused(
        GradientNotReducedError, program, build=Experts, bucket_cap_mb=bucket_cap_mb
    )
    assert "find_unused_parameters" in str(error)


def test_a_window_that_nobody_closed():
    def program(sync, models, rank):
        optimizer = sgd(*models)
        with sync.no_sync():
            sync.backward(squared(models[0])(*part(rank)), weight=1)
        optimizer.step()

    refused(GradientNotReducedError, program)


def test_other_models_on_other_ranks():
    def program(sync, models, rank):
        optimizer = sgd(*models)
        sync.backward(squared(models[rank])(*part(rank)), weight=1)
        optimizer.step()

    (error, _) = refused(GradientNotReducedError, program, build=lambda: [mlp(), mlp()])
    assert "different models" in str(error)


def test_other_layers_frozen_on_other_ranks():
    def program(sync, models, rank):
        optimizer = sgd(*models)
        models[0].module[rank * 2].requires_grad_(False)
        sync.backward(squared(models[0])(*part(rank)), weight=1)
        optimizer.step()

    refused(GradientNotReducedError, program)


def test_ranks_at_different_steps():
    def program(sync, models, rank):
        sync.begin_step(rank)
        sync.backward(squared(models[0])(*part(rank)), weight=1)

    refused(GradientNotReducedError, program)


def test_weighted_beside_plain():
    def program(sync, models, rank):
        loss = squared(models[0])(*part(rank))
        sync.backward(loss, weight=1) if rank else loss.backward()

    refused(MixedWeightsError, program)


def test_weights_that_add_up_to_zero_and_then_a_right_step():
    replicas = [reset(mlp(), 3) for _ in range(2)]

    def one_rank(group):
        (model,) = [replicas[group.rank]]
        sync = DDPSync([model], group, ddp_args={})
        wrapped = sync.models[0]
        for way in ("driven", "plain"):
            loss = squared(wrapped)(*part(group.rank))
            sync.set_delivered_weight(0.0)
            with pytest.raises(WeightError):
                sync.backward(loss, weight=0.0) if way == "driven" else loss.backward()
            sync.forget_window()
        sync.backward(squared(wrapped)(*part(group.rank)), weight=1)
        sync.detach()
        return gradients(model)

    assert all(grad is not None for grad in run_ranks(2, one_rank)[0].values())


def test_reentrant_checkpointing_twice_through_one_layer():
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Linear):
        def forward(self, x):
            hidden = x.clone().requires_grad_(True)
            for _ in range(2):
                hidden = checkpoint(
                    super().forward, hidden, use_reentrant=True, preserve_rng_state=False
                )
            return hidden

    def program(sync, models, rank):
        sync.backward(models[0](part(rank)[0]).square().mean(), weight=1)

    refused(GradientNotReducedError, program, build=lambda: Twice(4, 4))


def test_shards_in_order_and_arguments_that_are_ours():
    model = mlp()
    sync = DDPSync([model], Group(None), ddp_args={})
    with pytest.raises(WrongUseError):
        sync.take_shard(0)
    sync.detach()
    for name in ("process_group", "static_graph", "init_sync", "no_such_argument"):
        with pytest.raises(ConfigurationError, match=name):
            DDPSync([model], Group(None), ddp_args={name: None})


def test_a_weight_in_two_models_and_sparse_gradients():
    one, two = mlp(), mlp()
    two[0].weight = one[0].weight
    with pytest.raises(ConfigurationError, match="two registered modules"):
        DDPSync([one, two], Group(None), ddp_args={})
    with pytest.raises(SparseGradientError):
        DDPSync([nn.Embedding(3, 2, sparse=True)], Group(None), ddp_args={})


def test_what_is_local_stays_each_ranks_own():
    replicas = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 3), Scaled()).double()
        local(model[1])
        replicas.append(reset(model, 5))

    class Both(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, y):
            return self.inner[1](self.inner[0](x), y)

    def one_rank(group):
        model = Both(replicas[group.rank])
        sync = DDPSync([model], group, ddp_args={})
        sync.backward(sync.models[0](*part(group.rank)), weight=1)
        sync.detach()
        return gradients(model)

    first, second = run_ranks(2, one_rank)
    assert torch.equal(first["0.inner.0.weight"], second["0.inner.0.weight"])
    assert not torch.equal(first["0.inner.1.scale"], second["0.inner.1.scale"])


def test_after_detach_the_model_is_a_module_again():
    def one_rank(group):
        model = reset(mlp(), 3)
        sync = DDPSync([model], group, ddp_args={})
        wrapped = sync.models[0]
        sync.backward(squared(wrapped)(*part(group.rank)), weight=1)
        sync.detach()
        sync.detach()
        optimizer = sgd(model)
        optimizer.zero_grad()
        squared(wrapped)(*part(group.rank)).backward()
        optimizer.step()
        copied = copy.deepcopy(wrapped)
        assert type(copied) is nn.Sequential
        return gradients(model)

    first, second = run_ranks(2, one_rank)
    assert not torch.equal(first["0.0.weight"], second["0.0.weight"])


def test_buffers_follow_rank_0_unless_ddp_args_say_not():
    def one_rank(group, **ddp_args):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        reset(model, 3)
        sync = DDPSync([model], group, ddp_args=ddp_args)
        sync.backward(sync.models[0](part(group.rank)[0]).square().sum(), weight=1)
        sync.detach()
        return model[1].running_mean.clone()

    first, second = run_ranks(2, one_rank)
    assert torch.equal(first, second)
    first, second = run_ranks(2, lambda group: one_rank(group, forward_sync_buffers=False))
    assert not torch.equal(first, second)
