# SPDX-License-Identifier: Apache-2.0
"""What an optimizer holds, written down once: names, shapes, wrappers and who shares them."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Final

from lockstep.audit.facts import Parameter
from lockstep.audit.prints import samples_per_tensor
from lockstep.audit.probe.fully_sharded import names_of_pieces, ranks_of_mesh
from lockstep.audit.probe.names import living_modules, parameter_names
from lockstep.audit.probe.shards import (
    is_fully_sharded,
    is_piece,
    pieces_of_flat_parameters,
    replicas_of,
    span_in_whole,
)
from lockstep.sync.local_parameters import is_local

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import Optimizer

    from lockstep.audit.facts import Track
    from lockstep.audit.probe.probe import Probe

SEARCHES: Final = 16
"""Optimizers for which every object of the process is looked at. A program with more has one for
each parameter of models that are known by then, or makes them round by round, and then what one
of them holds is called as in an earlier round."""


def describe(probe: Probe, optimizer: Optimizer) -> list[Parameter]:
    """What it holds, in its order."""
    held = [p for g in optimizer.param_groups for p in g["params"]]
    names, pieces = _named(probe, held)
    counts = samples_per_tensor([_local_size(p) for p in held])
    described = []
    known: dict[str, int] = {}
    for place, (param, count) in enumerate(zip(held, counts, strict=True)):
        wrapper = probe.wrapper_of(param)
        ignored = any(id(param) in w.ignored for w in probe.wrappers)
        name = names.get(id(param), f"parameter {place}")
        known[name] = known.get(name, -1) + 1
        described.append(
            Parameter(
                f"{name}#{known[name]}" if known[name] else name,
                list(param.shape),
                str(param.dtype).removeprefix("torch."),
                wrapper=wrapper.key if wrapper else None,
                group=wrapper.ranks if wrapper else replicas_of(param),
                sharded=is_piece(param) or id(param) in pieces,
                weighed=_is_weighed(param),
                local=is_local(param) or ignored,
                in_module=id(param) in names,
                samples=count,
            )
        )
    return described


def _is_weighed(param: torch.Tensor) -> bool:
    # Looked up and not imported: without the import lockstep reduces nothing here.
    guard = sys.modules.get("lockstep.sync.optimizer_guard")
    return guard is not None and guard.is_synchronised(param)


def _named(probe: Probe, held: list[torch.Tensor]) -> tuple[dict[int, str], set[int]]:
    """By ``id(parameter)``: what the user calls it; and which are pieces of flat parameters."""
    if len(probe.ledger.tracks) >= SEARCHES and not probe.run:
        known = probe.living_modules()
        names = _names_in(known)
        if all(id(param) in names for param in held):
            return names, pieces_of_flat_parameters(known)
        if (track := _like(probe, held)) is not None:
            pairs = list(zip(held, track.parameters, strict=True))
            names = {id(param): earlier.name for param, earlier in pairs if earlier.in_module}
            return names, {id(param) for param, earlier in pairs if earlier.sharded}
    modules = probe.run.modules if probe.run and probe.run.modules else living_modules()
    probe.living = [weakref.ref(module) for module in modules]
    pieces = pieces_of_flat_parameters(modules)
    probe.ledger.facts.fsdp = bool(pieces) or any(map(is_fully_sharded, modules))
    probe.ledger.facts.fsdp_ranks = ranks_of_mesh(modules)
    return _names_in(modules), pieces


def _names_in(modules: list[torch.nn.Module]) -> dict[int, str]:
    return {**names_of_pieces(modules), **parameter_names(modules)}


def _like(probe: Probe, held: list[torch.Tensor]) -> Track | None:
    """The last one that held parameters of the same shapes."""
    shapes = [list(param.shape) for param in held]
    tracks = reversed(probe.ledger.tracks)
    return next((t for t in tracks if [p.shape for p in t.parameters] == shapes), None)


def _local_size(param: torch.Tensor) -> int:
    if span_in_whole(param) is not None:
        return param.numel()  # ranks sample the same elements of the whole, each those it has
    return int(param.to_local().numel()) if hasattr(param, "to_local") else param.numel()
