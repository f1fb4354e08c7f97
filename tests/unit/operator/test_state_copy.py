# SPDX-License-Identifier: Apache-2.0
"""Going back leaves an optimizer the very groups that a user may have kept, and its attributes."""

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from harness import reset
from lockstep.operator.state_copy import StateCopy


def test_an_optimizer_goes_back_in_its_own_groups():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4, 3, dtype=torch.float64)

    def step():
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return [p.detach().clone() for p in layer.parameters()]

    step()
    kept, group = StateCopy(layer.parameters(), [optimizer]), optimizer.param_groups[0]
    expected = [step(), step()]
    group["added"] = 1
    kept.restore()
    assert optimizer.param_groups[0] is group
    assert "added" not in group
    assert group["params"] == list(layer.parameters())
    assert all(map(torch.equal, step(), expected[0]))
    group["lr"] = 0.0
    assert all(map(torch.equal, step(), expected[0]))


def test_a_group_that_was_added_since_is_taken_away():
    torch.manual_seed(0)
    layer, late = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    kept = StateCopy(layer.parameters(), [optimizer])
    optimizer.add_param_group({"params": late.parameters()})
    late(layer(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    kept.restore()
    assert [group["params"] for group in optimizer.param_groups] == [list(layer.parameters())]
    assert not optimizer.state


@dataclass
class Norms:
    largest: float = 0.0
    last: deque = field(default_factory=lambda: deque(maxlen=2))
    first: float = field(init=False, repr=False, compare=False)


class Lookahead(torch.optim.Optimizer):
    """Keeps all in attributes of its own, and no state beside that of the one within it."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.calls, self.slow, self.norms = inner, 0, None, Norms()
        self.param_groups, self.state, self.fast = inner.param_groups, inner.state, inner.state
        self.counted = Counter(begun=1)
        self.held, self.described = tuple(inner.param_groups[0]["params"]), {"by": str}

    @torch.no_grad()
    def step(self, closure=None):
        if self.slow is None:
            self.slow = {p: [p.clone()] for p in self.held}
        self.inner.step()
        self.calls += 1
        self.counted["steps"] += 1
        self.norms.last.append(float(self.held[0].grad.norm()))
        self.norms.first = getattr(self.norms, "first", self.norms.last[0])
        self.norms.largest = max(self.norms.largest, *self.norms.last)
        if self.calls % 2 == 0:
            for param, (slow,) in self.slow.items():
                slow.lerp_(param, 0.5 / (1 + self.norms.largest))
                param.copy_(slow)
            self.last = self.calls


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_an_optimizer_has_the_attributes_that_it_had(num_before):
    layer = reset(nn.Linear(3, 2), seed=1)
    optimizer = Lookahead(torch.optim.Adam(layer.parameters(), lr=0.1))

    def step():
        optimizer.zero_grad()
        layer(torch.ones(4, 3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        return [p.detach().clone() for p in layer.parameters()]

    for _ in range(num_before):
        step()
    inner, calls, slow = optimizer.inner, optimizer.calls, optimizer.slow
    counted, has_first = Counter(optimizer.counted), hasattr(optimizer.norms, "first")
    kept = StateCopy(layer.parameters(), [optimizer])
    expected = [step() for _ in range(3)]
    kept.restore()
    assert optimizer.calls == calls
    assert optimizer.slow is slow
    assert optimizer.counted == counted
    assert hasattr(optimizer.norms, "first") == has_first
    assert optimizer.inner is inner
    assert optimizer.fast is optimizer.state is inner.state
    assert "last" in vars(optimizer) if num_before == 2 else "last" not in vars(optimizer)
    for weights in expected:
        assert all(map(torch.equal, step(), weights))


def test_attributes_of_an_optimizer_that_is_added_go_back_too():
    layer = reset(nn.Linear(3, 2), seed=1)
    kept = StateCopy(layer.parameters(), [])
    optimizer = Lookahead(torch.optim.SGD(layer.parameters(), lr=0.1))
    kept.add(optimizer)
    layer(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    kept.restore()
    assert (optimizer.calls, optimizer.slow, optimizer.norms) == (0, None, Norms())
