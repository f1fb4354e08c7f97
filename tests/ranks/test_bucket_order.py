# SPDX-License-Identifier: Apache-2.0
"""Buckets beside other collectives of the same ranks: the gradient of one process, or an error.

Wherever collectives could meet the wrong ones here they are equally long, so that gloo adds them up
without an error.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from harness import (
    assert_equal_on_all_ranks,
    assert_same,
    gradients,
    outcomes,
    reset,
    rows,
    run_ranks,
)
from lockstep.collectives import gather
from lockstep.errors import GradientNotReducedError
from lockstep.sync import replicate
from lockstep.sync.ddp_sync import DDPSync
from ranks.test_replicate_exact import weights

WIDTH = 8
ONE_WEIGHT_MB = WIDTH * WIDTH * 8 / 2**20
"""One weight to a bucket, which is then as long as the rows of a rank."""


def square():
    return nn.Linear(WIDTH, WIDTH, bias=False)


class AllReduce(torch.autograd.Function):
    """The sum over the ranks, as `torch.distributed.nn.functional.all_reduce`."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return AllReduce.total(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return AllReduce.total(gradient, ctx.group), None

    @staticmethod
    def total(tensor, group):
        flat = tensor.flatten().clone()  # one dimension, as a bucket: lockstep sends both alike
        group.all_reduce(flat).wait()
        return flat.view_as(tensor)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.main, self.extra = square(), square(), square()

    def forward(self, x):
        return self.main(self.encoder(x)) + self.extra(x)

    def head(self, hidden, *, branch):
        outputs = self.main(hidden) + self.extra(hidden) if branch else self.main(hidden)
        return outputs.square().mean()


@dataclass
class Step:
    """What the ranks do in a step; `branches` and `weights` by rank."""

    branches: tuple[bool, bool]
    crosses: bool = True
    weights: tuple[float, float] = (1.0, 1.0)


def batch(number, rank, step):
    # A rank of weight zero has no rows: what it adds to the others' is zero, and so is its part.
    return rows(WIDTH, WIDTH, seed=10 * number + rank) * (step.weights[rank] > 0)


def in_one_process(steps):
    """The gradients of each step, and the weights after the last one."""
    net, seen = reset(Net(), seed=3), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for number, step in enumerate(steps):
        optimizer.zero_grad()
        hidden = [net.encoder(batch(number, rank, step)) for rank in range(2)]
        if step.crosses:
            hidden = [sum(hidden)] * 2
        losses = [net.head(h, branch=b) for h, b in zip(hidden, step.branches, strict=True)]
        weighted = sum(w * loss for w, loss in zip(step.weights, losses, strict=True))
        (weighted / sum(step.weights)).backward()
        seen.append(gradients(net))
        optimizer.step()
    return seen, net


def on_a_rank(net, group, steps, way):
    sync = replicate(net, group=group, bucket_cap_mb=ONE_WEIGHT_MB)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    seen = []
    try:
        for number, step in enumerate(steps):
            optimizer.zero_grad()
            hidden = net.encoder(batch(number, group.rank, step))
            if step.crosses:
                hidden = AllReduce.apply(hidden, group)
            loss = net.head(hidden, branch=step.branches[group.rank])
            if way == "plain":
                loss.backward()
            else:
                sync.backward(loss, weight=step.weights[group.rank])
            seen.append(gradients(net))
            optimizer.step()
    finally:
        sync.detach()
    return seen


BOTH, ONE, NONE = (True, True), (True, False), (False, False)

RIGHT = {
    "a branch of one rank": [Step(ONE)] * 3,
    "the branch of one rank comes and goes": [Step(BOTH), Step(ONE), Step(NONE), Step(ONE)],
    "a collective that comes later": [Step(BOTH, crosses=False), Step(BOTH), Step(ONE), Step(NONE)],
}
RIGHT_BY_WEIGHT = {
    # The ranks' losses must be in one unit there, before any round has told the ranks of one.
    "weights that count tokens": [Step(BOTH, weights=(3.0, 1100.0))] * 3,
    "no weight on one rank": [Step(BOTH, weights=(1.0, 0.0))] * 3,
    "no weight on one rank from the second step on": [
        Step(BOTH),
        *[Step(BOTH, weights=(1.0, 0.0))] * 2,
    ],
}
CASES = [(name, "plain") for name in RIGHT]
CASES += [(name, "weighted") for name in RIGHT | RIGHT_BY_WEIGHT]


@pytest.mark.parametrize(("case", "way"), CASES)
def test_a_collective_of_the_models_own_inside_backward(case, way):
    steps = (RIGHT | RIGHT_BY_WEIGHT)[case]
    replicas = [reset(Net(), seed=3) for _ in range(2)]

    def body(group):
        return on_a_rank(replicas[group.rank], group, steps, way)

    results = run_ranks(2, body)
    true, _ = in_one_process(steps)
    for number, expected in enumerate(true):
        assert_equal_on_all_ranks([seen[number] for seen in results])
        assert_same(results[0][number], expected)


@pytest.mark.parametrize("way", ["plain", "weighted"])
def test_a_collective_that_comes_with_the_branch_of_one_rank_is_refused_before_the_step(way):
    """By then buckets leave early: before the collective on one rank, after it on the other."""
    before = [Step(BOTH, crosses=False)] * 2
    replicas = [reset(Net(), seed=3) for _ in range(2)]

    def body(group):
        on_a_rank(replicas[group.rank], group, [*before, Step(ONE)], way)

    for error in outcomes(2, body):
        assert isinstance(error, GradientNotReducedError)
        assert "different rounds together" in str(error)
    _, true = in_one_process(before)
    for net in replicas:
        assert_same(weights([net]), weights([true]))


def test_two_syncs_of_one_backward():
    """The second one's buckets leave after the first one's, on every rank."""
    branches = [ONE, BOTH, ONE, NONE]

    def build():
        return reset(nn.Sequential(square(), square()), seed=4), reset(Net(), seed=5)

    def loss_of(generator, critic, number, rank):
        made = generator(rows(WIDTH, WIDTH, seed=20 * number + rank))
        return critic.head(critic.encoder(made).tanh(), branch=branches[number][rank])

    replicas = [build() for _ in range(2)]

    def body(group):
        modules = replicas[group.rank]
        syncs = [replicate(each, group=group, bucket_cap_mb=ONE_WEIGHT_MB) for each in modules]
        seen = []
        for number in range(len(branches)):
            for each in modules:
                each.zero_grad()
            loss_of(*modules, number, group.rank).backward()
            seen.append(gradients(*modules))
        for sync in syncs:
            sync.detach()
        return seen

    results = run_ranks(2, body)
    true = build()
    for number in range(len(branches)):
        for each in true:
            each.zero_grad()
        (sum(loss_of(*true, number, rank) for rank in range(2)) / 2).backward()
        assert_equal_on_all_ranks([seen[number] for seen in results])
        assert_same(results[0][number], gradients(*true))


def wrapped(model, *, group, bucket_cap_mb, **ddp_args):
    return DDPSync([model], group, ddp_args=ddp_args, bucket_cap_mb=bucket_cap_mb)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("cap_mb", [25, ONE_WEIGHT_MB])
@pytest.mark.parametrize("attach", [replicate, wrapped])
def test_models_that_look_alike_in_another_order(attach, cap_mb, size):
    """Each rank begins with another one; at no rank may the mean of the others' look right."""
    replicas = [[reset(Net(), seed=3) for _ in range(size)] for _ in range(size)]

    def body(group):
        models = replicas[group.rank]
        syncs = [attach(each, group=group, bucket_cap_mb=cap_mb) for each in models]
        chosen = syncs[group.rank].models[0] if attach is wrapped else models[group.rank]
        try:
            chosen(rows(WIDTH, WIDTH, seed=1)).square().mean().backward()
        finally:
            for sync in syncs:
                sync.detach()

    for error in outcomes(size, body):
        assert isinstance(error, GradientNotReducedError)
        assert "different rounds together" in str(error)


class Behind(nn.Module):
    """The branch lies behind the collective: DDP takes the bucket of what is not used for full."""

    def __init__(self):
        super().__init__()
        # With unused parameters to find, DDP's buckets are in this order.
        self.main, self.extra, self.encoder = square(), square(), square()

    def forward(self, x, total, branch):
        hidden = self.encoder(x) + self.extra(x) if branch else self.encoder(x)
        return self.main(total(hidden)).square().mean()


def under_ddp(replicas, crosses):
    """What each of two ranks has seen of `replicas`, one of which leaves out the branch."""

    def body(group):
        sync = wrapped(
            replicas[group.rank],
            group=group,
            bucket_cap_mb=ONE_WEIGHT_MB,
            find_unused_parameters=True,
        )
        seen = []
        try:
            for number, does_cross in enumerate(crosses):
                replicas[group.rank].zero_grad()
                total = (lambda h: AllReduce.apply(h, group)) if does_cross else nn.Identity()
                x = rows(WIDTH, WIDTH, seed=40 * number + group.rank)
                sync.models[0](x, total, group.rank == 0).backward()
                seen.append(gradients(replicas[group.rank]))
        except GradientNotReducedError as error:
            seen.append(error)
        finally:
            sync.detach()
        return seen

    return run_ranks(2, body)


def test_a_collective_of_the_models_own_under_ddp():
    results = under_ddp([reset(Behind(), seed=8) for _ in range(2)], [True] * 3)
    true = reset(Behind(), seed=8)
    for number in range(3):
        true.zero_grad()
        parts = [rows(WIDTH, WIDTH, seed=40 * number + rank) for rank in range(2)]
        hidden = true.encoder(parts[0]) + true.extra(parts[0]) + true.encoder(parts[1])
        true.main(hidden).square().mean().backward()
        assert_equal_on_all_ranks([seen[number] for seen in results])
        assert_same(results[0][number], gradients(true))


def test_under_ddp_a_collective_that_comes_later_is_told_of_in_the_next_backward():
    """DDP's buckets carry nothing but gradients, so the ranks compare before the next ones."""
    crosses = [False, False, True, True]
    for seen in under_ddp([reset(Behind(), seed=8) for _ in range(2)], crosses):
        assert len(seen) == len(crosses)
        assert isinstance(seen[-1], GradientNotReducedError)
        assert "different rounds together" in str(seen[-1])


def plain_loss(out, group):
    return out.square().mean()


def loss_over_all_rows(out, group):
    return (out @ gather(out, group=group).T).square().mean()


def loss_over_a_sum(out, group):
    return AllReduce.apply(out, group).square().mean()


@pytest.mark.parametrize(
    ("loss_of", "inner", "early"),
    [
        (plain_loss, False, [False, True, True]),
        (loss_over_all_rows, False, [False, True, True]),
        (loss_over_a_sum, False, [False, True, True]),
        (plain_loss, True, [False, False, False]),
    ],
    ids=["usual", "gather", "a sum before the layers", "a sum between layers"],
)
def test_buckets_leave_early_unless_something_else_communicates(loss_of, inner, early):
    replicas = [reset(nn.Sequential(*(square() for _ in range(4))), seed=6) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group, bucket_cap_mb=ONE_WEIGHT_MB)
        reducer = sync._rounds.transport.reducer
        have_left = []
        for number in range(3):
            first = model[0](rows(WIDTH, WIDTH, seed=30 * number + group.rank))
            first.register_hook(lambda _: have_left.append(reducer.has_launched))
            second = model[1](first)
            out = model[2:](AllReduce.apply(second, group) if inner else second)
            sync.backward(loss_of(out, group), weight=WIDTH)
        sync.detach()
        return have_left

    assert run_ranks(2, body) == [early, early]
