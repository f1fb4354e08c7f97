# SPDX-License-Identifier: Apache-2.0
"""Steps count, and their gradients are known, whatever an optimizer keeps of its own."""

import pytest
import torch

import lockstep.audit
from lockstep.audit.ledger import Ledger


class _Unreadable(dict):
    def get(self, key, default=None):
        raise NotImplementedError("not for you")


def _with_unreadable_state(made):
    made.state = _Unreadable()


def _with_an_unreadable_setting(made):
    made.param_groups[0]["phase"] = torch.tensor(1j)


@pytest.mark.parametrize("change", [_with_unreadable_state, _with_an_unreadable_setting])
def test_what_cannot_be_read_of_an_optimizer_costs_no_step(change):
    seen = []
    net = torch.nn.Linear(4, 2)
    lockstep.audit.start(mode="full")
    try:
        made = torch.optim.SGD(net.parameters(), lr=0.1)
        change(made)
        for _ in range(3):
            net(torch.ones(5, 4)).square().mean().backward()
            made.step()
    finally:
        lockstep.audit.stop(exchange=lambda mine: seen.append(mine) or [mine])
    ledger = Ledger.from_bytes(seen[0])
    (track,) = ledger.tracks
    assert (track.count, len(track.steps)) == (3, 3)
    assert ledger.facts.unseen
    for step in track.steps:
        assert len(step.backwards) == 1
        assert step.exit is not None
