# SPDX-License-Identifier: Apache-2.0
"""A process that a launcher started as one of several, before `init_process_group`."""

import pytest
import torch
import torch.distributed as dist
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


@pytest.fixture
def begin_group(tmp_path, monkeypatch):
    """Makes this process the first of two, as a program of `torch.multiprocessing.spawn` does."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def begin(size):
        # Makes no connection: what is asked is whether there is a world group, and how large.
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_that_comes_after_replicate_is_refused_at_the_next_backward(begin_group):
    model = nn.Linear(2, 1)
    sync = lockstep.replicate(model)
    model(torch.ones(3, 2)).mean().backward()  # alone, by all that is known
    begin_group(2)
    for backward in (torch.Tensor.backward, lambda loss: sync.backward(loss, weight=3)):
        with pytest.raises(WrongUseError, match=r"2 ranks(.|\n)*before replicate"):
            backward(model(torch.ones(3, 2)).mean())
    sync.detach()


def test_a_group_that_comes_after_shard_loader_is_refused_at_the_next_iteration(begin_group):
    loader = lockstep.shard_loader(DataLoader([1, 2, 3]))
    assert len(list(loader)) == 3
    begin_group(2)
    with pytest.raises(WrongUseError, match=r"2 ranks(.|\n)*before replicate"):
        next(iter(loader))


@pytest.mark.parametrize(("size", "group"), [(1, None), (2, Group(None))])
def test_a_process_that_is_or_is_to_be_alone_goes_on(size, group, begin_group):
    model = nn.Linear(2, 1)
    sync = lockstep.replicate(model, group=group)
    loader = lockstep.shard_loader(DataLoader([1, 2, 3]), group=group)
    begin_group(size)
    model(torch.ones(3, 2)).mean().backward()
    assert len(list(loader)) == 3
    sync.detach()
