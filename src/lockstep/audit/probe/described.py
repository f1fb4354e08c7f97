# SPDX-License-Identifier: Apache-2.0
"""What an optimizer holds, written down once: names, shapes, wrappers and who shares them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

from lockstep.audit.ledger import Parameter
from lockstep.audit.prints import samples_per_tensor
from lockstep.audit.probe.fully_sharded import names_of_pieces
from lockstep.audit.probe.names import living_modules, parameter_names
from lockstep.audit.probe.shards import (
    is_fully_sharded,
    is_piece,
    pieces_of_flat_parameters,
    replicas_of,
)
from lockstep.sync.ownership import is_local

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import Optimizer

    from lockstep.audit.probe.probe import Probe

SEARCHES: Final = 16
"""Optimizers for which every object of the process is looked at; a program with more makes them
round by round, and what one of them holds is like what an earlier one held."""


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
                local=is_local(param) or ignored,
                in_module=id(param) in names,
                samples=count,
            )
        )
    return described


def _named(probe: Probe, held: list[torch.Tensor]) -> tuple[dict[int, str], set[int]]:
    """By ``id(parameter)``: what the user calls it; and which are pieces of flat parameters."""
    tracks = probe.ledger.tracks
    if len(tracks) >= SEARCHES and not probe.run:
        shapes = [list(param.shape) for param in held]
        for track in reversed(tracks):
            if [param.shape for param in track.parameters] == shapes:
                pairs = list(zip(held, track.parameters, strict=True))
                names = {id(param): earlier.name for param, earlier in pairs if earlier.in_module}
                return names, {id(param) for param, earlier in pairs if earlier.sharded}
    modules = probe.run.modules if probe.run and probe.run.modules else living_modules()
    probe.living = [weakref.ref(module) for module in modules]
    names = {**names_of_pieces(modules), **parameter_names(modules)}
    pieces = pieces_of_flat_parameters(modules)
    probe.ledger.facts["fsdp"] = bool(pieces) or any(map(is_fully_sharded, modules))
    return names, set(pieces)


def _local_size(param: torch.Tensor) -> int:
    return int(param.to_local().numel()) if hasattr(param, "to_local") else param.numel()
