# SPDX-License-Identifier: Apache-2.0
"""Which buffers a forward's result follows from, and that following leaves torch as it was."""

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.audit.probe.buffers_used import note_buffers
from lockstep.audit.probe.dataflow import Dataflow
from lockstep.audit.probe.probe import Probe

W = torch.ones(3, requires_grad=True)


def _added(b, x):
    return x * W + b


def _picked(b, x):
    return (x * W)[(x + b).topk(2).indices]


def _under_no_grad(b, x):
    with torch.no_grad():
        target = x - b
    return (target * W).sum()


def _written_over(b, x):
    b.copy_(x)
    return x * W + b


def _written_in_part(b, x):
    b[:2] = x[:2]
    return x * W + b


def _kept(b, x):
    b.mul_(0.9).add_(x, alpha=0.1)
    return x * W


def _replaced(b, x):
    b = 0.9 * b + 0.1 * x
    return x * W


def _in_a_view(b, x):
    table = torch.zeros(2, 3)
    table[0] = b
    return (table.view(6)[:3] + x) * W


def _as_a_number(b, x):
    return x * W * b.sum().item()


def _in_a_dictionary(b, x):
    return {"loss": [x * W + b]}


def _without_a_gradient(b, x):
    return x + b


@pytest.mark.parametrize(
    ("forward", "reaches"),
    [
        (_added, True),
        (_picked, True),
        (_under_no_grad, True),
        (_in_a_view, True),
        (_in_a_dictionary, True),
        (_written_in_part, True),
        (_written_over, False),
        (_kept, False),
        (_replaced, False),
        (_as_a_number, False),
        (_without_a_gradient, False),
    ],
)
def test_a_value_is_followed_through_every_operation(forward, reaches):
    errors = []
    buffer, other = torch.zeros(3), torch.zeros(3)

    def guard(look, *given):
        try:
            return look(*given)
        except Exception as error:
            errors.append(error)

    with Dataflow([other, buffer], guard) as flow:
        result = forward(buffer, torch.arange(3.0))
    assert flow.reaches(result) == ({1} if reaches else set())
    assert flow.stores == ({1} if forward is _written_in_part else set())
    assert errors == []


@pytest.mark.filterwarnings("ignore:flex_attention called")
def test_what_compiles_itself_computes_the_same():
    q = torch.arange(48.0).reshape(1, 1, 3, 16)

    def score(value, batch, head, row, column):
        return value - (row - column).abs()

    plain = flex_attention(q, q, q, score_mod=score)
    with Dataflow([q], lambda look, *given: look(*given)):
        assert torch.equal(flex_attention(q, q, q, score_mod=score), plain)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.register_buffer("centre", torch.zeros(3))
        self.fails = False

    def forward(self, x):
        out = self.body(x) - self.centre
        self.centre += 0.1
        if self.fails:
            raise ValueError("of the program's")
        return out


def _step(probe, model, x):
    """A step as the probe sees it, which calls the hook before each forward."""
    note_buffers(probe, model)
    result = model(x)
    probe.steps_done += 1
    return result


def test_following_changes_no_number_and_ends_with_its_forward():
    probe, model, plain = Probe(), Centred(), Centred()
    plain.load_state_dict(model.state_dict())
    for _ in range(3):
        x = torch.randn(2, 3)
        assert torch.equal(_step(probe, model, x), plain(x))
        assert torch._C._len_torch_dispatch_stack() == 0
        assert not model._forward_hooks
    (fact,) = probe.ledger.buffers_used
    assert (fact.used, fact.steps) == (["centre"], [0, 1, 2])
    assert probe.ledger.facts.unseen == []


def test_a_forward_that_fails_leaves_nothing_behind_and_is_followed_the_next_time():
    probe, model = Probe(), Centred()
    _step(probe, model, torch.ones(1, 3))
    model.fails = True
    with pytest.raises(ValueError, match="of the program's"):
        _step(probe, model, torch.ones(1, 3))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not model._forward_hooks
    model.fails, probe.steps_done = False, 2
    _step(probe, model, torch.ones(1, 3))
    assert probe.ledger.buffers_used[0].used == ["centre"]


def test_beside_a_mode_of_the_programs_own_nothing_is_entered():
    class Counts(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    probe, model = Probe(), Centred()
    _step(probe, model, torch.ones(1, 3))
    with Counts() as counts:
        _step(probe, model, torch.ones(1, 3))
    assert counts.calls
    assert probe.ledger.buffers_used[0].used is None


def test_a_buffer_that_never_changes_costs_one_look():
    probe, model = Probe(), nn.Linear(3, 3)
    model.register_buffer("mask", torch.ones(3))
    for _ in range(3):
        _step(probe, model, torch.ones(1, 3))
    (fact,) = probe.ledger.buffers_used
    assert (fact.used, fact.steps) == (None, [0])


@pytest.fixture
def world_of_two():
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_two")
def test_what_a_collective_brings_follows_from_no_ranks_own_value():
    buffer = torch.ones(3)
    with Dataflow([buffer], lambda look, *given: look(*given)) as flow:
        of_all = buffer * 0.5
        dist.all_reduce(of_all)
        assert flow.reaches(W * of_all) == set()
        assert flow.reaches(W * buffer) == {0}


class Queue(nn.Module):
    """Rows of its own, a part of which each forward replaces."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.register_buffer("rows", torch.zeros(4, 3))

    def forward(self, x):
        result = self.body(x) @ self.rows.clone().T
        self.rows[:2] = x[:2]
        return result


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.body = nn.Linear(3, 3)

    def forward(self, x):
        return self.body(self.norm(x))


@pytest.mark.parametrize("kind", [Queue, Normed])
def test_a_queue_of_samples_and_running_statistics_are_each_ranks_own(kind):
    probe, model = Probe(), kind()
    for _ in range(3):
        _step(probe, model, torch.randn(4, 3))
    assert probe.ledger.buffers_used == []
