# SPDX-License-Identifier: Apache-2.0
"""What torch does not document of ``DeviceMesh``, and of what it keeps by mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug

if TYPE_CHECKING:
    import torch.distributed as dist


def make_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """The mesh of `group`, for the tensors of this thread from now on.

    Torch 2.12 to 2.14. For each operation on ``DTensor``s torch keeps what its result is, the mesh
    included, and finds it by meshes that are equal. Meshes of as many ranks are equal, whichever of
    them this process is and whether the group still lives. So a result would be on the mesh of an
    earlier group, with the rank that this process had there: its rows would be taken for another
    rank's.
    """
    debug._clear_sharding_prop_cache()
    return DeviceMesh.from_group(group, device_type)


def forget_groups(mesh: DeviceMesh) -> None:
    """Let a mesh drop the process groups that it keeps by name.

    Torch 2.13; the meshes of 2.6 keep none.
    """
    getattr(mesh, "_pg_registry", {}).clear()
