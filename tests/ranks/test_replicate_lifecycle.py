# SPDX-License-Identifier: Apache-2.0
"""Attach, refuse, fail, let go, attach again."""

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    _global_module_registration_hooks,
    _global_parameter_registration_hooks,
)
from torch.optim.optimizer import _global_optimizer_pre_hooks

from harness import assert_same, gradients, outcomes, reset, ring, rows, run_ranks
from lockstep.errors import (
    ConfigurationError,
    GradientNotReducedError,
    LostUpdateError,
    NotAvailableError,
    PeerLostError,
    ReplicasDifferError,
    WrongTypeError,
)
from lockstep.sync import local, replicate

X = rows(8, 4, seed=1)


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def test_everything_starts_as_on_rank_0():
    def build(rank):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model.register_buffer("flag", torch.tensor([True, False]))
        model.register_buffer("nothing", None)
        reset(model, seed=rank)
        model.flag.fill_(bool(rank == 0))
        model.mine = local(nn.Parameter(torch.full((2,), float(rank))))
        return model

    replicas = [build(rank) for rank in range(3)]

    def body(group):
        sync = replicate(replicas[group.rank], group=group, bucket_cap_mb=1e-5)
        sync.detach()
        return replicas[group.rank].state_dict()

    first, *others = run_ranks(3, body)
    expected = build(0).state_dict()
    for rank, state in enumerate((first, *others)):
        for name, value in expected.items():
            mine = torch.full((2,), float(rank))
            assert torch.equal(state[name], mine if name == "mine" else value), name


def test_a_model_of_large_tensors_alone():
    """Each travels by itself, and nothing is left for a message of the others."""
    replicas = [nn.Linear(512, 513, bias=False) for _ in range(2)]
    for rank, model in enumerate(replicas):
        nn.init.constant_(model.weight, float(rank))

    def body(group):
        replicate(replicas[group.rank], group=group).detach()
        return replicas[group.rank].weight.abs().max().item()

    assert run_ranks(2, body) == [0.0, 0.0]


def test_broadcast_false_leaves_values_alone():
    replicas = [reset(mlp(), seed=rank) for rank in range(2)]

    def body(group):
        before = replicas[group.rank][0].weight.detach().clone()
        replicate(replicas[group.rank], group=group, broadcast=False).detach()
        return torch.equal(before, replicas[group.rank][0].weight)

    assert run_ranks(2, body) == [True, True]


DIFFERENT = {
    "shape": (lambda: nn.Linear(4, 3), lambda: nn.Linear(4, 2), r"`weight` \(3, 4\)"),
    "dtype": (lambda: nn.Linear(4, 3), lambda: nn.Linear(4, 3).double(), "float64"),
    "count": (lambda: nn.Linear(4, 3), lambda: nn.Linear(4, 3, bias=False), "nothing more"),
    "frozen": (lambda: nn.Linear(4, 3), lambda: nn.Linear(4, 3).requires_grad_(False), "frozen"),
    "strides": (
        lambda: nn.Conv2d(2, 2, 2),
        lambda: nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last),
        "strides",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_models_are_refused_on_every_rank_before_any_payload(case):
    build, other, text = DIFFERENT[case]
    replicas = [build(), other(), build()]
    before = [[p.detach().clone() for p in model.parameters()] for model in replicas]

    def body(group):
        with pytest.raises(ReplicasDifferError, match=rf"rank 1 against rank 0(.|\n)*{text}"):
            replicate(replicas[group.rank], group=group)

    run_ranks(3, body)
    for model, values in zip(replicas, before, strict=True):
        assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))


def test_what_one_rank_alone_cannot_synchronise_is_refused_on_every_rank():
    def body(group):
        is_lazy = group.rank == 1
        error = WrongTypeError if is_lazy else ReplicasDifferError
        with pytest.raises(error, match="lazy parameter"):
            replicate(nn.LazyLinear(3) if is_lazy else nn.Linear(4, 3), group=group)

    run_ranks(3, body)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_whose_forward_writes_rows_of_its_batch_trains_on_one_rank_alone(kind):
    replicas = [kind(4, 3, max_norm=1.0) for _ in range(3)]

    def body(group):
        with pytest.raises(LostUpdateError, match=r"`weight` with max_norm"):
            replicate(replicas[group.rank], group=group)
        replicas[group.rank].requires_grad_(False)
        replicate(nn.Sequential(replicas[group.rank], nn.Linear(3, 2)), group=group).detach()

    run_ranks(2, body)
    replicate(replicas[2]).detach()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_counts_the_rows_of_its_batch_trains_on_one_rank_alone(kind):
    replicas = [kind(4, 3, scale_grad_by_freq=True) for _ in range(3)]

    def body(group):
        with pytest.raises(LostUpdateError, match=r"`weight` with scale_grad_by_freq"):
            replicate(replicas[group.rank], group=group)
        replicas[group.rank].requires_grad_(False)
        replicate(nn.Sequential(replicas[group.rank], nn.Linear(3, 2)), group=group).detach()

    run_ranks(2, body)
    replicate(replicas[2]).detach()


def test_refusals_at_attach():
    model = mlp()
    sync = replicate(model)
    with pytest.raises(ConfigurationError, match=r"`0\.weight` is synchronised already"):
        replicate(model)
    with pytest.raises(ConfigurationError, match="synchronised already"):
        replicate([nn.Linear(2, 2), model[2]])
    sync.detach()
    with pytest.raises(WrongTypeError, match=r"got +int"):
        replicate(3)
    with pytest.raises(WrongTypeError, match=r"`0\.weight` is a lazy parameter"):
        replicate(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(WrongTypeError, match=r"`1\.running_mean` is a lazy buffer(.|\n)*forward"):
        replicate(nn.Sequential(nn.Linear(4, 3), nn.LazyBatchNorm1d()))
    small = nn.Linear(4, 3, dtype=torch.bfloat16)
    small.weight.grad_dtype = torch.float32  # an attribute of no effect before torch 2.13
    with pytest.raises(WrongTypeError, match=r"`weight`(.|\n)*has grad_dtype=torch.float32"):
        replicate(small)
    with pytest.raises(ConfigurationError, match="buffers"):
        replicate(model, buffers="sometimes")
    with pytest.raises(ConfigurationError, match="bucket_cap_mb"):
        replicate(model, bucket_cap_mb=0)
    with pytest.raises(WrongTypeError, match="local"):
        local(3)
    replicate(model).detach()


def test_buffers_follow_rank_0_after_a_backward_or_by_hand():
    def build():
        return reset(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), seed=1)

    replicas = [build() for _ in range(2)]

    def body(group, way):
        model = replicas[group.rank]
        sync = replicate(model, group=group, buffers=way)
        mine = X[:4] if group.rank == 0 else X[4:]
        model(mine).square().mean().backward()
        after = model[1].running_mean.clone()
        sync.broadcast_buffers()
        by_hand = model[1].running_mean.clone()
        count = int(model[1].num_batches_tracked)
        sync.detach()
        return after, by_hand, count

    (zero, _, count), (one, _, _) = run_ranks(2, lambda group: body(group, "after_backward"))
    assert torch.equal(zero, one)
    assert count == 1
    (zero, _, _), (one, by_hand, _) = run_ranks(2, lambda group: body(group, "manual"))
    assert not torch.equal(zero, one)
    assert torch.equal(zero, by_hand)


def test_detach_leaves_plain_gradients_and_no_hooks():
    model = reset(mlp(), seed=1)
    sync = replicate(model)
    sync.backward(model(X).square().mean(), weight=8)
    before = gradients(model)
    sync.detach()
    sync.detach()
    assert_same(gradients(model), before, tolerance=0.0)
    storages = {param.grad.untyped_storage().data_ptr() for param in model.parameters()}
    assert len(storages) == 4
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    with pytest.raises(NotAvailableError, match="detached"):
        sync.backward(model(X).mean())
    with pytest.raises(NotAvailableError, match="detached"):
        sync.reduce_pending()


@pytest.mark.parametrize(
    ("bucket_cap_mb", "is_frozen"),
    [
        (25, True),
        (0.01, False),
        pytest.param(25, False, marks=pytest.mark.slow),
        pytest.param(0.01, True, marks=pytest.mark.slow),
    ],
)
def test_models_that_are_dropped_without_detach_are_freed(bucket_cap_mb, is_frozen):
    """Also with several buckets, or a parameter that may be unfrozen: those need further hooks."""
    gc.collect()  # a sync of before may wait for it, and would be freed between the two counts
    replicate(mlp()).detach()  # takes the hooks away that a sync of before may have left
    tables = (
        _global_optimizer_pre_hooks,
        _global_parameter_registration_hooks,
        _global_module_registration_hooks,
    )
    before = [len(table) for table in tables]
    dropped = []
    for _ in range(3):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[0].bias.requires_grad_(not is_frozen)
        replicate(model, bucket_cap_mb=bucket_cap_mb)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        dropped.append(weakref.ref(model))
        del model, optimizer
        gc.collect()
        # Of torch's own hooks there is one each; they go with the next sync that is detached.
        assert [len(table) for table in tables] == [length + 1 for length in before]
    assert [model() for model in dropped] == [None] * 3
    replicate(mlp()).detach()
    assert [len(table) for table in tables] == before


class _Boom(Exception):
    """The user's own."""


class _Raise(torch.autograd.Function):
    """Goes off in backward, in the middle of the model."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise _Boom


@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_raises_in_backward_frees_the_others_and_all_start_again(size, driven):
    replicas = [reset(mlp(), seed=2) for _ in range(size)]
    again, met = ring(size), threading.Barrier(size)
    kept: list[BaseException] = []
    groups: list[weakref.ref] = []

    def loss_of(model, mine, fails):
        hidden = model[0](mine)
        return model[2](_Raise.apply(hidden) if fails else hidden).square().sum(1).mean()

    def body(group):
        model = replicas[group.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = replicate(model, group=group, bucket_cap_mb=1e-4)
        # Of the process group itself: sockets close when it is gone, whatever else lives on.
        groups.append(weakref.ref(group._process_group))
        mine = X[group.rank :: size]

        def step(sync, fails):
            optimizer.zero_grad()
            loss = loss_of(model, mine, fails)
            if driven:
                sync.backward(loss, weight=len(mine))
            else:
                sync.set_delivered_weight(len(mine))
                loss.backward()
            optimizer.step()

        step(sync, fails=False)
        step(sync, fails=False)
        began = time.monotonic()
        try:
            step(sync, fails=group.rank == 1)
        except (PeerLostError, _Boom) as error:
            kept.append(error)
            ended = type(error)
        waited = time.monotonic() - began
        sync.detach()
        group.close()
        met.wait()

        second = again(group.rank)
        sync = replicate(model, group=second, broadcast=False)
        step(sync, fails=False)
        sync.detach()
        second.close()
        return ended, waited, {name: p.detach().clone() for name, p in model.named_parameters()}

    results = run_ranks(size, body)
    for rank, (ended, waited, _) in enumerate(results):
        assert ended is (_Boom if rank == 1 else PeerLostError)
        assert waited < 15.0  # and not the group's time-out of 20
    # The exceptions, and so their tracebacks, are still alive; the process groups are not.
    assert len(kept) == size
    assert [reference() for reference in groups] == [None] * size

    true = reset(mlp(), seed=2)
    optimizer = torch.optim.SGD(true.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(true, X, False).backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in true.named_parameters()}
    for _, _, after in results:
        assert_same(after, expected)


def test_a_caught_failure_in_mid_backward_is_not_trained_over():
    replicas = [reset(mlp(), seed=2) for _ in range(2)]
    failed = threading.Event()

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group, bucket_cap_mb=1e-4)
        model(X).square().mean().backward()  # the first backward does not overlap
        if group.rank == 0:
            try:
                model(X).square().mean().backward()
            finally:
                failed.wait()
                sync.detach()
        try:
            with pytest.raises(_Boom):
                model[2](_Raise.apply(model[0](X))).square().mean().backward()
            model.zero_grad()
            with pytest.raises(GradientNotReducedError, match="failed after part"):
                model(X).square().mean().backward()
            with pytest.raises(GradientNotReducedError, match="failed after part"):
                sync.backward(model(X).mean(), weight=1)
        finally:
            failed.set()
        sync.detach()
        replicate(model).detach()

    lost, refused = outcomes(2, body)
    assert isinstance(lost, PeerLostError)
    assert refused is None


def test_a_caught_failure_before_anything_was_sent_is_nothing():
    replicas = [reset(mlp(), seed=2) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        for driven in (False, True):
            if group.rank == 1:
                loss = model[2](_Raise.apply(model[0](X))).square().mean()
                backward = sync.backward if driven else torch.Tensor.backward
                with pytest.raises(_Boom):
                    backward(loss)
            model.zero_grad()
            model(X).square().mean().backward()
        sync.detach()
        return gradients(model)

    true = reset(mlp(), seed=2)
    true(X).square().mean().backward()
    for got in run_ranks(2, body):
        assert_same(got, gradients(true))
