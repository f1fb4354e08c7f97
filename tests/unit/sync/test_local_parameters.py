# SPDX-License-Identifier: Apache-2.0
"""A local buffer is one by its place, whichever tensor a forward has put there."""

import copy

import torch
from torch import nn

import lockstep
from lockstep.sync import is_local_buffer, named_local_tensors
from lockstep.sync.synced_tensors import find_synced_tensors


class Recurrent(nn.Linear):
    """Goes on from a state of its own, and counts; a second module has the same state."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("h", torch.zeros(2))
        self.register_buffer("seen", torch.zeros(()))
        self.reader = nn.Module()
        self.reader.register_buffer("state", self.h)

    def forward(self, x):
        h = super().forward(x).mean(0) + self.h
        self.h = self.reader.state = h.detach()
        self.seen = self.seen + 1
        return h


def test_a_buffer_that_was_marked_alone_stays_local_in_its_place():
    model = Recurrent()
    lockstep.local(model.h)
    assert [*find_synced_tensors([model]).buffers] == ["seen"]
    model(torch.ones(1, 2))
    for each in (model, copy.deepcopy(model)):
        assert is_local_buffer(each, "h")
        assert is_local_buffer(each.reader, "state")
        assert not is_local_buffer(each, "seen")
        assert [name for name, _ in named_local_tensors(each)] == ["h", "reader.state"]
        assert [*find_synced_tensors([each]).buffers] == ["seen"]


def test_a_buffer_of_a_local_module_is_local_before_and_after_a_forward_has_filled_it():
    model = nn.Sequential(nn.Linear(2, 2), lockstep.local(Recurrent()))
    model[1].register_buffer("late", None)
    names = {"1.weight", "1.bias", "1.h", "1.seen", "1.late", "1.reader.state"}
    assert {name for name, _ in named_local_tensors(model)} == names
    assert not find_synced_tensors([model]).buffers
    model[1].late = torch.ones(2)
    model(torch.ones(1, 2))
    assert {name for name, _ in named_local_tensors(model)} == names
    assert not find_synced_tensors([model]).buffers
