# SPDX-License-Identifier: Apache-2.0
"""Parameters of modules that have gradients and that no optimizer of this rank holds.

They were forgotten; or optimizers hold copies, or a part on each rank, and the program carries the
gradients there and the weights back by hand. Then both are written down, for the first steps, with
what the ranks told one another in each.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from lockstep.audit.facts import Beside
from lockstep.audit.fingerprint import take
from lockstep.audit.probe.names import outermost, parameter_names
from lockstep.audit.probe.probe import sequence_number

if TYPE_CHECKING:
    import torch

    from lockstep.audit.probe.probe import Probe, Watched, Window

_OPTIMIZERS: Final = 4
_LEAST: Final = 2
"""Dimensions of weights; a scalar or a vector may be a multiplier that is updated by hand."""


def note_unheld(probe: Probe, watched: Watched) -> None:
    """Before a step: which there are, and all parameters and gradients if there are any."""
    step = watched.step
    assert step is not None
    if step.number and not watched.looks_beside:
        return
    if len(probe.optimizers) > _OPTIMIZERS and watched.track is not probe.ledger.tracks[0]:
        return  # one for each parameter, say: they step together, and one of them looks
    modules = probe.living_modules()
    names_of = parameter_names(modules)
    parameters = _with_gradients(modules, names_of)
    if step.number == 0:
        held = probe.parameters_held()
        unheld = [(name, p) for name, p in parameters if id(p) not in held]
        step.unowned = [f"{name} {list(p.shape)}" for name, p in unheld]
        watched.looks_beside = bool(unheld)
        every = (p for module in modules for p in module._parameters.values() if p is not None)
        watched.frozen = [weakref.ref(p) for p in every if not p.requires_grad]
    if watched.looks_beside:
        # By name: modules are not found in the same order on all ranks.
        names = sorted(
            name for name, count in Counter(n for n, _ in parameters).items() if count < 2
        )
        of_name = dict(parameters)
        tensors = [of_name[name] for name in names]
        no_samples = [0] * len(tensors)
        step.beside = Beside(
            names=names,
            sizes=[p.numel() for p in tensors],
            weights=take(tensors, no_samples, norms=False),
            gradients=take([p.grad for p in tensors], no_samples),
            left_out=[] if step.number else _left_out(probe, modules, names_of),
            issued=sequence_number(dist.group.WORLD) if dist.is_initialized() else -1,
        )


def note_unfrozen(probe: Probe, watched: Watched) -> None:
    """Before a later step: which were frozen at the first one, and have gradients now."""
    step = watched.step
    assert step is not None
    known = [p for reference in watched.frozen if (p := reference()) is not None]
    unfrozen = [p for p in known if p.requires_grad and p.grad is not None and p.ndim >= _LEAST]
    if step.number and unfrozen:
        watched.frozen = []  # it is said once
        held, names = probe.parameters_held(), parameter_names(probe.living_modules())
        unheld = {id(p): p for p in unfrozen if id(p) not in held}
        step.unowned = [f"{names.get(id(p), '?')} {list(p.shape)}" for p in unheld.values()]


def note_told_within(watched: Watched, window: Window) -> None:
    """After a step: the collectives that it called itself."""
    step = watched.step
    if step is not None and step.beside is not None:
        step.beside.within = window.collectives[len(step.collectives) :]
        step.beside.is_all = len(window.collectives) < window.LIMIT


def _left_out(probe: Probe, modules: list[torch.nn.Module], names: dict[int, str]) -> list[str]:
    """Weights of layers of models most of which is held; not of two models that share names."""
    held = probe.parameters_held()
    known = Counter(names.values())
    found = []
    for root in outermost(modules):
        of_root = [p for p in root.parameters() if p.requires_grad and p.grad is not None]
        unheld = [p for p in of_root if id(p) not in held]
        if 2 * sum(p.numel() for p in unheld) < sum(p.numel() for p in of_root):
            weights = [p for p in unheld if p.ndim >= _LEAST]
            found += [names[id(p)] for p in weights if known[names.get(id(p), "?")] == 1]
    return found


def _with_gradients(
    modules: list[torch.nn.Module], names: dict[int, str]
) -> list[tuple[str, torch.Tensor]]:
    """The parameters of all modules that have one, each once, with its name."""
    each = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    return [
        (names.get(id(p), "?"), p) for p in each.values() if p.requires_grad and p.grad is not None
    ]
