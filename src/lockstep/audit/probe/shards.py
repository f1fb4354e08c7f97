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


def span_in_whole(param: Any) -> tuple[int, int] | None:
    """Where the rows of a piece begin in its whole, in elements, and how many the whole has.

    None for a tensor that is no piece, or that is not cut along its first dimension alone.
    """
    if not is_piece(param) or param.dim() == 0:
        return None
    sizes = [param.device_mesh.size(dim) for dim in range(len(param.placements))]
    cuts = [
        dim
        for dim, (placement, size) in enumerate(zip(param.placements, sizes, strict=True))
        if size > 1 and not placement.is_replicate()
    ]
    place = param.device_mesh.get_coordinate()
    if len(cuts) != 1 or type(param.placements[cuts[0]]).__name__ != "Shard" or place is None:
        return None
    if param.placements[cuts[0]].dim != 0:
        return None
    height = -(-param.shape[0] // sizes[cuts[0]])
    start = min(place[cuts[0]] * height, param.shape[0])
    return start * (param.numel() // max(param.shape[0], 1)), param.numel()


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
