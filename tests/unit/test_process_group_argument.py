# SPDX-License-Identifier: Apache-2.0
"""What a user may hand over as a group, and what is refused with words about it."""

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from lockstep.data import shard_loader
from lockstep.errors import ConfigurationError, WrongTypeError
from lockstep.group import resolve_group


@pytest.fixture(autouse=True)
def world_of_two():
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def shard(group):
    return shard_loader(DataLoader(TensorDataset(torch.arange(4))), group=group)


@pytest.mark.parametrize("take", [resolve_group, shard])
def test_a_group_of_other_ranks_is_refused(take):
    take(dist.new_group([0]))
    with pytest.raises(ConfigurationError, match=r"not in the group(.|\n)*on the ranks of the gr"):
        take(dist.new_group([1]))


@pytest.mark.parametrize("take", [resolve_group, shard])
def test_a_mesh_is_told_from_its_group(take):
    mesh = init_device_mesh("cpu", (2,))
    assert resolve_group(mesh.get_group()).size == 2
    with pytest.raises(WrongTypeError, match=r"DeviceMesh(.|\n)*mesh.get_group\(\)"):
        take(mesh)
    with pytest.raises(WrongTypeError, match=r"got +str"):
        take("world")
