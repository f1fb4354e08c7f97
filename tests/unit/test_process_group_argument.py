# SPDX-License-Identifier: Apache-2.0
"""What a user may hand over as a group, and what is refused with words about it."""

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend "fake"
from torch.distributed.device_mesh import init_device_mesh

from lockstep.errors import ConfigurationError, WrongTypeError
from lockstep.group import resolve_group


@pytest.fixture(autouse=True)
def world_of_two():
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_a_group_of_other_ranks_is_refused():
    assert resolve_group(dist.new_group([0])).size == 1
    with pytest.raises(ConfigurationError, match=r"not in the group(.|\n)*on the ranks of the gr"):
        resolve_group(dist.new_group([1]))


def test_a_mesh_is_told_from_its_group():
    mesh = init_device_mesh("cpu", (2,))
    assert resolve_group(mesh.get_group()).size == 2
    with pytest.raises(WrongTypeError, match=r"DeviceMesh(.|\n)*mesh.get_group\(\)"):
        resolve_group(mesh)
    with pytest.raises(WrongTypeError, match=r"got +str"):
        resolve_group("world")
