# SPDX-License-Identifier: Apache-2.0
"""Programs of public bug reports, on `replicate`: they come out right, or are refused.

Under a wrapper each of them trained on wrong gradients without a word. A name says whose
mechanism it is; one program stands for all reports of the same mechanism.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from harness import assert_same, cut, gradients, outcomes, reset, rows, run_ranks
from lockstep import TrainingOperator
from lockstep.errors import (
    GradientNotReducedError,
    PeerLostError,
    ReplicasDifferError,
    UnknownParameterError,
)
from lockstep.operator import RankContext
from lockstep.sync import replicate
from lockstep.testing import assert_parity
from lockstep.worker import WorkerSpec
from ranks.public_bugs import (
    Alone,
    X,
    Y,
    a1_loss_method_of_the_inner_module,
    a2_loss_on_the_unwrapped_decoder_and_raw_head,
    a5_adapters_replace_forward_of_a_frozen_base,
    a7_modules_wrapped_together_and_called_apart,
    b8_progressive_unfreezing,
    c3_no_sync_on_the_first_module_only,
    c5_several_losses_through_a_checkpoint,
    c6_used_only_while_paused,
    c7_a_head_that_nobody_uses,
    c13_reduce_every_micro_batch_step_once,
    c15_paused_around_backward_only,
    net,
    sgd,
    weights,
)
from ranks.table import worker_outcomes


def with_adapter():
    return [net(), reset(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 6)), 5)]


def apart(models, group):
    (model,) = models
    return [replicate(module, group=group) for module in (model.trunk, model.head)]


def together(models, group):
    return replicate(models, group=group)


def adapter_alone(models, group):
    return replicate(models[1], group=group)


RIGHT = [
    (a1_loss_method_of_the_inner_module, None, together),
    (a2_loss_on_the_unwrapped_decoder_and_raw_head, None, together),
    (a5_adapters_replace_forward_of_a_frozen_base, with_adapter, adapter_alone),
    (a7_modules_wrapped_together_and_called_apart, None, together),
    (b8_progressive_unfreezing, None, together),
    (c5_several_losses_through_a_checkpoint, None, together),
    (c6_used_only_while_paused, None, together),
    (c7_a_head_that_nobody_uses, None, together),
    (c13_reduce_every_micro_batch_step_once, None, together),
    (c15_paused_around_backward_only, None, together),
]


def detach(sync):
    for each in sync if isinstance(sync, list) else [sync]:
        each.detach()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("program", "build", "attach"), RIGHT, ids=[program.__name__ for program, *_ in RIGHT]
)
def test_comes_out_right(program, build, attach, size):
    build = build or (lambda: [net()])
    replicas = [build() for _ in range(size)]

    def one_rank(group):
        models = replicas[group.rank]
        sync = attach(models, group)
        mine = cut(8, [8 // size] * size)[group.rank]
        try:
            program(models, X[mine], Y[mine], sync)
        finally:
            detach(sync)
        return gradients(*models), weights(*models)

    true = build()
    program(true, X, Y, Alone())
    for grads, after in run_ranks(size, one_rank):
        assert_same(grads, gradients(*true))
        assert (after - weights(*true)).abs().max() < 1e-12


def test_c3_a_window_that_only_one_of_two_syncs_is_in():
    """Both are right: one adds up and reduces once, the other one reduces each part."""
    replicas = [net() for _ in range(2)]

    def one_rank(group):
        models = [replicas[group.rank]]
        models[0].spare.requires_grad_(False)
        sync = apart(models, group)
        mine = cut(8, [4, 4])[group.rank]
        c3_no_sync_on_the_first_module_only(models, X[mine], Y[mine], sync)
        detach(sync)
        return weights(*models)

    true = [net()]
    true[0].spare.requires_grad_(False)
    c3_no_sync_on_the_first_module_only(true, X, Y, [Alone()])
    for after in run_ranks(2, one_rank):
        assert (after - weights(*true)).abs().max() < 1e-12


# ------------------------------------------------------------------------- what is refused


def c2_window_off_by_one(rank, model, sync, optimizer, x, y):
    """The first micro-batch is reduced, not the last one."""
    for index in range(4):
        with nullcontext() if index % 2 == 0 else sync.no_sync():
            model.compute_loss(x[index : index + 1], y[index : index + 1]).backward()
        if index % 2 == 1:
            optimizer.step()


def c9_autograd_grad(rank, model, sync, optimizer, x, y):
    used = [*model.trunk.parameters(), *model.head.parameters()]
    grads = torch.autograd.grad(model.compute_loss(x, y), used)
    for parameter, grad in zip(used, grads, strict=True):
        parameter.grad = grad
    optimizer.step()


@pytest.mark.parametrize("program", [c2_window_off_by_one, c9_autograd_grad])
def test_a_gradient_of_one_rank_alone_is_refused_before_the_step(program):
    replicas = [net() for _ in range(2)]

    def one_rank(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        mine = cut(8, [4, 4])[group.rank]
        try:
            with pytest.raises(GradientNotReducedError, match="LS101"):
                program(group.rank, model, sync, sgd(model), X[mine], Y[mine])
        finally:
            sync.detach()
        return weights(model)

    for after in run_ranks(2, one_rank):
        assert torch.equal(after, weights(net()))


def test_c14_a_tail_that_nobody_reduces_is_refused_and_a_weighted_one_is_exact():
    def windows(model, optimizer, backward, paused, x, y):
        """Three micro-batches of one row, then a tail of one."""
        for index in range(4):
            closes = index in (2, 3)
            with nullcontext() if closes else paused():
                backward(model.compute_loss(x[index : index + 1], y[index : index + 1]))
            if closes:
                optimizer.step()
                optimizer.zero_grad()

    replicas = [net() for _ in range(2)]

    def one_rank(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        optimizer = sgd(model)
        mine = cut(8, [4, 4])[group.rank]
        x, y = X[mine], Y[mine]
        windows(model, optimizer, lambda loss: sync.backward(loss, weight=1), sync.no_sync, x, y)
        after = weights(model)
        with sync.no_sync():
            model.compute_loss(x[:1], y[:1]).backward()
        with pytest.raises(GradientNotReducedError, match="LS101"):
            optimizer.step()
        assert torch.equal(after, weights(model))
        sync.detach()
        return after

    true = net()
    optimizer = sgd(true)
    for picked in ([0, 1, 2, 4, 5, 6], [3, 7]):
        optimizer.zero_grad()
        true.compute_loss(X[picked], Y[picked]).backward()
        optimizer.step()
    for after in run_ranks(2, one_rank):
        assert (after - weights(true)).abs().max() < 1e-12


def test_c8_a_rank_that_never_closes_its_window_is_refused_and_nobody_hangs():
    replicas = [net() for _ in range(2)]

    def one_rank(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        optimizer = sgd(model)
        try:
            for index in range(2):
                closes = index == 1 and group.rank == 0
                with nullcontext() if closes else sync.no_sync():
                    model.compute_loss(X[:2], Y[:2]).backward()
            optimizer.step()
        finally:
            sync.detach()

    waiting, refusing = outcomes(2, one_rank)
    assert isinstance(refusing, GradientNotReducedError)
    assert isinstance(waiting, PeerLostError)
    for model in replicas:
        assert torch.equal(weights(model), weights(net()))


def test_b2_a_head_replaced_after_attaching_is_refused():
    replicas = [net() for _ in range(2)]
    heads = [reset(nn.Linear(6, 3), 9) for _ in range(2)]

    def one_rank(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        model.head = heads[group.rank]
        optimizer = sgd(model)
        before = weights(model)
        mine = cut(8, [4, 4])[group.rank]
        try:
            with pytest.raises(UnknownParameterError, match=r"LS102(.|\n)*`head\.weight`"):
                model.compute_loss(X[mine], Y[mine]).backward()
            with pytest.raises(UnknownParameterError, match="LS102"):
                optimizer.step()
        finally:
            sync.detach()
        assert torch.equal(before, weights(model))

    run_ranks(2, one_rank)


class Attached(TrainingOperator):
    """Registers a frozen part, and an optimizer of the part that is trained."""

    def setup(self, config):
        model = net()
        model.head.requires_grad_(False)
        self.register(models=model.head, optimizers=sgd(model.trunk))


def test_b6_an_optimizer_of_what_was_left_out_is_refused():
    def one_rank(group):
        setting = RankContext(world_rank=group.rank, world_size=group.size, group=group)
        with pytest.raises(UnknownParameterError, match="belongs to no registered module"):
            Attached({}, setting).setup({})

    run_ranks(2, one_rank)


class ResetAfterwards(TrainingOperator):
    """Weights that every rank draws, or loads, for itself once they had been made equal."""

    def setup(self, config):
        model = net()
        self.register(models=model, optimizers=sgd(model))
        reset(model.head, 20 + self.world_rank)


def test_b3_b7_weights_that_differ_by_rank_after_attaching_are_refused():
    spec = WorkerSpec(ResetAfterwards, {}, num_workers=2, num_shards=2, seed=0)
    for refusal in worker_outcomes(spec, lambda worker: None):
        assert isinstance(refusal, ReplicasDifferError), refusal
        assert "head.weight" in str(refusal)


# --------------------------------------------------------------------- F: what a mean is over


def ranks_of_unequal_tokens(size):
    """[2, 30] tokens, or [2, 30, 5, 11]; each row is a token."""
    return [2, 30, 5, 11][:size]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("accumulated", [False, True])
def test_f1_f2_f5_f8_a_mean_over_all_tokens_of_ranks_and_windows(size, accumulated):
    counts = ranks_of_unequal_tokens(size)
    x, y = rows(sum(counts), 4, seed=5), rows(sum(counts), 3, seed=6)
    replicas = [net() for _ in range(size)]

    def one_rank(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        mine = cut(sum(counts), counts)[group.rank]
        parts = [slice(mine.start, mine.stop)]
        if accumulated:
            parts = [slice(mine.start, mine.start + 1), slice(mine.start + 1, mine.stop)]
        for number, part in enumerate(parts):
            with sync.no_sync() if number < len(parts) - 1 else nullcontext():
                loss = model.compute_loss(x[part], y[part])
                sync.backward(loss, weight=part.stop - part.start)
        sync.detach()
        return gradients(model)

    true = net()
    true.compute_loss(x, y).backward()
    for got in run_ranks(size, one_rank):
        assert_same(got, gradients(true))


@pytest.mark.parametrize("counts", [[8], [4, 4], [6, 2], [3, 1, 2, 2]])
def test_f7_the_scale_does_not_depend_on_how_many_rows_a_rank_has(counts):
    replicas = [net() for _ in counts]

    def one_rank(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        mine = cut(8, counts)[group.rank]
        sync.backward(model.compute_loss(X[mine], Y[mine]), weight=mine.stop - mine.start)
        sync.detach()
        return gradients(model)

    true = net()
    true.compute_loss(X, Y).backward()
    for got in run_ranks(len(counts), one_rank):
        assert_same(got, gradients(true))


def test_f6_a_loss_times_the_number_of_ranks_is_named():
    def times_n(model, batch):
        x, y = batch
        return model.compute_loss(x, y) * (2 if len(x) < len(X) else 1)

    with pytest.raises(AssertionError, match="2 times too large: summed but not divided"):
        assert_parity(times_n, net, [(X, Y)])
