# SPDX-License-Identifier: Apache-2.0
"""A buffer that `lockstep.local` leaves to each rank, and that each forward replaces."""

import pytest
import torch
from torch import nn

from harness import run_ranks
from lockstep import local, replicate
from lockstep.sync import agree_on_shapes


class Recurrent(nn.Module):
    """A state with a row for each row of the batch, and a running count that ranks share."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("h", torch.zeros(1, 2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.h = x + self.h
        self.seen = self.seen + len(x)
        return self.layer(self.h)


@pytest.mark.parametrize("marks", ["h", "module"])
def test_rounds_and_a_new_group_leave_it_alone(marks):
    def body(group):
        model = nn.Sequential(Recurrent(), nn.Linear(2, 2))
        cell, rows = model[0], group.rank + 1  # of another shape on each rank
        local(cell if marks == "module" else cell.h)
        sync = replicate(model, group=group)
        for _ in range(2):
            model(torch.full((rows, 2), float(rows))).sum().backward()
        agree_on_shapes(group, [model])
        sync.detach()
        replicate(model, group=group).detach()
        return cell.h, cell.seen

    for rank, (h, seen) in enumerate(run_ranks(2, body)):
        assert torch.equal(h, torch.full((rank + 1, 2), 2.0 * (rank + 1)))
        assert seen == 2 * (rank + 1 if marks == "module" else 1)
