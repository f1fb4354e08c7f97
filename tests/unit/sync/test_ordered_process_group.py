# SPDX-License-Identifier: Apache-2.0
"""Torch makes a group that is written in Python, beside what it does for its own ones."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lockstep._torch_compat.fully_shard import rows_of_shard
from lockstep.data_parallel_mesh import DataParallelMesh
from lockstep.group import Group
from lockstep.sync.mesh_collectives import MeshCollectives
from lockstep.sync.ordered_process_group import make_ordered_group
from lockstep.sync.unit_order import UnitOrder


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_default_group_of_a_gpu_worker_is_bound_to_its_device(world):
    world.bound_device_id = torch.device("cuda", 0)
    group = Group(world)
    collectives = MeshCollectives(group, DataParallelMesh(0, 1))
    ordered = make_ordered_group(UnitOrder(group, ["model"]), collectives)
    assert world.bound_device_id == torch.device("cuda", 0)
    value = torch.ones(3)
    dist.all_reduce(value, group=ordered)
    assert value.tolist() == [1.0, 1.0, 1.0]
    ordered.close()


def test_the_rows_of_a_shard_are_one_tensor(world):
    mesh = DeviceMesh.from_group(world, "cpu")
    shard = DTensor.from_local(torch.arange(4.0), mesh, [Shard(0)])
    rows = rows_of_shard(shard)
    assert rows is rows_of_shard(shard)
    shard.mul_(2.0)
    assert rows.tolist() == [0.0, 2.0, 4.0, 6.0]
    # Each counts its own writes.
    assert (shard._version, rows._version) == (1, 0)
    shard.to_local().add_(1.0)
    assert (shard._version, rows._version) == (1, 1)
