# SPDX-License-Identifier: Apache-2.0
"""A program may fill in gradients of parameters that no rank has used, if all ranks do so alike."""

import pytest
import torch
from torch import nn

from harness import assert_same, outcomes, rows
from lockstep.errors import PeerLostError
from ranks.ways import attached, built, every_way, momentum, on_ranks, refused

X, Y = rows(12, 4, seed=1), rows(12, 3, seed=2)
HEADS = "abc"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({name: nn.Linear(4, 3) for name in HEADS})

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.trunk(x)))


def loss_of(model, head, part):
    return (model(X[part], head) - Y[part]).square().sum(dim=1).mean()


def zeros(model, params, part, backward, step):
    backward(loss_of(model, "a", part))
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)


def decays(model, params, part, backward, step):
    backward(loss_of(model, HEADS[step % 2], part))
    for param in params:
        grad = 0.0 if param.grad is None else param.grad
        param.grad = grad + 0.1 * param.detach()


def surgery(model, params, part, backward, step):
    """As PCGrad's libraries: two tasks of three, whose gradients are put together by hand."""
    found = []
    for head in (HEADS[step % 3], HEADS[(step + 1) % 3]):
        for param in params:
            param.grad = None
        backward(loss_of(model, head, part))
        found.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params])
    for param, one, other in zip(params, *found, strict=True):
        param.grad = one + other


def trained(model, params, optimizer, part, backward, fill):
    for step in range(4):
        optimizer.zero_grad()
        fill(model, params, part, backward, step)
        optimizer.step()
    return {str(number): param.detach().clone() for number, param in enumerate(params)}


def with_fill(fill):
    def on_a_rank(rank):
        part = slice(8, 12) if rank.number else slice(0, 8)

        def backward(loss):
            rank.sync.backward(loss, weight=part.stop - part.start)

        return trained(rank.model, rank.params, rank.optimizer, part, backward, fill)

    return on_a_rank


OPTIONS = {"build": Net, "ddp_args": {"find_unused_parameters": True}}


@every_way
@pytest.mark.parametrize("fill", [zeros, decays, surgery])
def test_what_all_ranks_fill_in_alike_is_stepped_with(way, fill):
    model = built(Net)
    params, optimizer = list(model.parameters()), momentum(model)
    alone = trained(model, params, optimizer, slice(0, 12), torch.Tensor.backward, fill)
    for weights in on_ranks(way, with_fill(fill), **OPTIONS):
        assert_same(weights, alone)


def own(model, params, part, backward, step):
    backward(loss_of(model, "a", part))
    left = [param for param in params if param.grad is None][:2]
    found = torch.autograd.grad(loss_of(model, "b", part), left)
    for param, grad in zip(left, found, strict=True):
        param.grad = grad


def numbers_of_rows(model, params, part, backward, step):
    backward(loss_of(model, "a", part))
    for param in params:
        if param.grad is None:
            param.grad = torch.full_like(param, part.stop)


@every_way
@pytest.mark.parametrize("fill", [own, numbers_of_rows])
def test_what_each_rank_fills_in_by_itself_is_refused_by_name(way, fill):
    for error in refused(way, "LS101", with_fill(fill), **OPTIONS):
        assert "`heads.b.weight`" in str(error)
        assert "`heads.a.weight`" not in str(error)


def test_what_one_rank_alone_fills_in_is_not_stepped_with():
    def fill(model, params, part, backward, step):
        backward(loss_of(model, "a", part))
        for param in params if part.start == 0 else []:
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def one(group):
        model = built(Net)
        with attached("replicate", group, model, [momentum(model)], None) as rank:
            with_fill(fill)(rank)

    ended = outcomes(2, one, timeout_s=1.0)
    assert all(isinstance(lost, PeerLostError) for lost in ended)
    assert any("every rank has to fill in alike" in str(lost) for lost in ended)
