# SPDX-License-Identifier: Apache-2.0
"""Going back leaves an optimizer the very groups that a user may have kept."""

import torch
from torch import nn

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
