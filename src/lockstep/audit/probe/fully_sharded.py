# SPDX-License-Identifier: Apache-2.0
"""What ``fully_shard`` has in hand when an optimizer steps.

It keeps gradients that it was told not to reduce yet where no optimizer and no ``zero_grad`` sees
them: in its own objects, whose names are torch's to change. What is not there is not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.audit.facts import KeptBack
from lockstep.audit.probe.shards import is_fully_sharded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from lockstep.audit.facts import Backward
    from lockstep.audit.probe.probe import Probe, Watched, Window


def note_kept_back(probe: Probe, watched: Watched, window: Window) -> None:
    """Which of an optimizer's gradients are not reduced yet."""
    step = watched.step
    if step is None or not window.backwards or not probe.ledger.facts.fsdp or step.inside_backward:
        return
    known = _held_in_pieces(probe.living_modules())
    unreduced = [
        described.name
        for param, described in zip(watched.parameters, watched.track.parameters, strict=True)
        if id(param) in known and _waits(known[id(param)][1])
    ]
    if unreduced:
        left = _after_the_last_reduction(window.backwards, watched.track.key)
        where = (left or window.backwards)[-1].where
        step.kept_back = KeptBack(unreduced, len(left), where)


def whole_of_pieces(probe: Probe) -> dict[int, torch.Tensor]:
    """By ``id`` of a piece: the whole parameter that stands in its place for autograd.

    Not of a model that lockstep reduces: it multiplies each loss by the weight of its batch, and
    divides afterwards, so that what a backward brings is not the gradient of that loss.
    """
    if not probe.ledger.facts.fsdp:
        return {}
    known = _held_in_pieces(probe.living_modules())
    whole = {
        piece: getattr(held, "_unsharded_param", None)
        for piece, (group, held) in known.items()
        if not type(getattr(group, "_reduce_scatter_comm", None)).__module__.startswith("lockstep.")
    }
    return {piece: leaf for piece, leaf in whole.items() if leaf is not None}


def is_root(module: torch.nn.Module) -> bool:
    """Was it given to ``fully_shard``, and is it no part of another module that was?

    Before its first forward torch does not know yet; the parts are told by that of their root.
    """
    state = _state_of(module)
    return state is not None and getattr(state, "_is_root", None) is not False


def names_of_pieces(modules: Iterable[torch.nn.Module]) -> dict[int, str]:
    """By ``id``: between forward and backward modules hold whole tensors in their places."""
    held = _held_in_pieces(modules)
    names = {piece: getattr(param, "_param_fqn", None) for piece, (_, param) in held.items()}
    return {piece: name for piece, name in names.items() if isinstance(name, str)}


def _held_in_pieces(modules: Iterable[torch.nn.Module]) -> dict[int, tuple[Any, Any]]:
    """By ``id`` of a piece: its group, and what torch keeps for it."""
    found = {}
    for group in _groups(modules):
        for held in getattr(group, "fsdp_params", None) or ():
            found[id(getattr(held, "sharded_param", None))] = group, held
    return found


def _groups(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """The groups of parameters that are reduced together."""
    seen: set[int] = set()
    for module in modules:
        state = _state_of(module) if is_fully_sharded(module) else None
        if state is not None and id(state) not in seen:
            seen.add(id(state))  # several modules may share one
            yield from getattr(state, "_fsdp_param_groups", None) or ()


def ranks_of_mesh(modules: Iterable[torch.nn.Module]) -> int | None:
    """How many ranks shard or copy the fully sharded modules; None without any."""
    meshes = (
        getattr(getattr(group, "mesh_info", None), "mesh", None) for group in _groups(modules)
    )
    return max((mesh.size() for mesh in meshes if mesh is not None), default=None)


def _state_of(module: torch.nn.Module) -> Any:
    get = getattr(type(module), "_get_fsdp_state", None)
    try:
        return None if get is None else get(module)
    except AssertionError:  # it has none
        return None


def _waits(held: Any) -> bool:
    """Is a gradient there that was not reduced? In the dtype of reductions it has its own place."""
    if getattr(held, "unsharded_accumulated_grad", None) is not None:
        return True
    return getattr(getattr(held, "_unsharded_param", None), "grad", None) is not None


def _after_the_last_reduction(backwards: list[Backward], key: str) -> list[Backward]:
    """A reduction writes the gradients that the optimizer sees; a backward without one does not."""
    left: list[Backward] = []
    for backward in backwards:
        if backward.kind == "backward":
            left = [] if key in backward.touched else [*left, backward]
    return left
