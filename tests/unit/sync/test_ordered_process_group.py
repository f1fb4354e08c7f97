# SPDX-License-Identifier: Apache-2.0
"""Torch makes a group that is written in Python, beside what it does for its own ones."""

import pytest
import torch
import torch.distributed as dist

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
