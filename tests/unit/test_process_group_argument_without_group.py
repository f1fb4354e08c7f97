# SPDX-License-Identifier: Apache-2.0
"""A process that a launcher started as one of several, before `init_process_group`."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from lockstep.errors import WrongUseError
from lockstep.group import Group

CALLS = {
    "replicate": lambda group: lockstep.replicate(nn.Linear(2, 1), group=group).detach(),
    "shard_loader": lambda group: lockstep.shard_loader(DataLoader([1, 2, 3]), group=group),
    "average_gradients": lambda group: lockstep.average_gradients(nn.Linear(2, 1), group=group),
    "gather": lambda group: lockstep.gather(torch.ones(2, 1), group=group),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_would_train_by_itself_and_is_refused(name, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(WrongUseError, match=r"rank 1(.|\n)*WORLD_SIZE=2(.|\n)*init_process_group"):
        CALLS[name](None)
    CALLS[name](Group(None))


@pytest.mark.parametrize(("size", "rank"), [("1", "0"), ("2", None), (None, "0")])
def test_a_process_alone_is_not(size, rank, monkeypatch):
    for name, value in (("WORLD_SIZE", size), ("RANK", rank)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert len(lockstep.shard_loader(DataLoader([1, 2, 3]))) == 3
    lockstep.replicate(nn.Linear(2, 1)).detach()
