# SPDX-License-Identifier: Apache-2.0
"""Parameters of which a rank holds a piece: which, and who else holds the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

_FULLY_SHARDED = frozenset({"FSDPModule", "FullyShardedDataParallel"})


def is_piece(param: Any) -> bool:
    """A DTensor of which ranks hold different pieces."""
    placements = getattr(param, "placements", None)
    if placements is None:
        return False
    # Sharded over one rank, it is there as a whole.
    sizes = map(param.device_mesh.size, range(len(placements)))
    return any(not p.is_replicate() and size > 1 for p, size in zip(placements, sizes, strict=True))


def replicas_of(param: Any) -> list[int] | None:
    """The ranks of a DTensor's mesh that hold the same piece of it; None for other tensors."""
    placements = getattr(param, "placements", None)
    if placements is None:
        return None
    mesh = param.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return []
    # Along a dimension that replicates all ranks hold it, along another only this place.
    where = [
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(placements, place, strict=True)
    ]
    return [int(rank) for rank in mesh.mesh[tuple(where)].flatten()]


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Does it shard its parameters over data-parallel ranks?"""
    return any(kind.__name__ in _FULLY_SHARDED for kind in type(module).__mro__)


def pieces_of_flat_parameters(modules: Iterable[torch.nn.Module]) -> set[int]:
    """By ``id``: what FullyShardedDataParallel cuts into pieces that are plain tensors."""
    found: set[int] = set()
    for module in modules:
        for handle in vars(module).get("_all_handles") or [vars(module).get("_handle")]:
            flat = getattr(handle, "flat_param", None)
            if flat is not None and getattr(handle, "uses_sharded_strategy", True):
                found.add(id(flat))
                found.update(map(id, getattr(flat, "_params", None) or ()))
    return found
