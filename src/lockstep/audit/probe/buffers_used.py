# SPDX-License-Identifier: Apache-2.0
"""Buffers that training changes and gradients follow from.

A centre, a codebook, a router's bias: no optimizer holds them, and outside of a wrapper that
broadcasts buffers nothing makes them the same on all ranks. Their values are written down as the
first forward of a step begins, if a step has changed them. In the first such forward it is seen
which of them reach what the module returns (`Dataflow`): counts and running statistics, which only
an evaluation uses, do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.audit.facts import UsedBuffers
from lockstep.audit.fingerprint import take
from lockstep.audit.prints import samples_per_tensor
from lockstep.audit.probe.dataflow import Dataflow
from lockstep.audit.probe.evaluations import saved_buffers
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.records import KeptBuffers

if TYPE_CHECKING:
    from lockstep.audit.probe.probe import Probe

_MODULES: Final = 16
"""The buffers of so many modules are looked at."""
_NEEDED: Final = "ignore_compile_internals"
"""What torch asks a mode before it compiles. An older torch does not compile under any mode."""
_TIMES: Final = 64
"""The probe writes down the buffers of one module so often."""


def note_buffers(probe: Probe, module: torch.nn.Module) -> None:
    """A forward of `module` begins, with gradients."""
    if isinstance(module, DistributedDataParallel):
        return  # it broadcasts the buffers, and then calls the module within
    kept = probe.buffers_used.get(id(module))
    if kept is None or kept.module() is not module:
        kept = _look_at(probe, module)
    if kept.fact is None or kept.step == probe.steps_done or probe.compiles:
        return  # where torch compiles, a forward that is followed would run without its compiler
    kept.step = probe.steps_done
    held = dict(_candidates(module))
    if list(held) != kept.fact.names or len(kept.fact.steps) >= _TIMES:
        kept.fact = None  # the module has other buffers now, or enough was written down
        return
    buffers = list(held.values())
    if not kept.has_changed(buffers):
        return
    _write_down(probe, kept.fact, buffers)
    if kept.fact.used is None and len(kept.fact.steps) > 1:
        _follow(probe, kept, module, buffers)


def _look_at(probe: Probe, module: torch.nn.Module) -> KeptBuffers:
    """Begin to look at the buffers of a module, and so no more at those of its parts alone."""
    for part in module.modules():
        probe.buffers_used[id(part)] = KeptBuffers(part, None)
    held = dict(_candidates(module))
    fact = None
    if held and len(probe.ledger.buffers_used) < _MODULES:
        shapes = [b.numel() for b in held.values()]
        fact = UsedBuffers(
            type(module).__name__,
            list(held),
            samples_per_tensor(shapes),
            users_lines(),
            trains=any(parameter.requires_grad for parameter in module.parameters()),
        )
        probe.ledger.buffers_used.append(fact)
    kept = probe.buffers_used[id(module)] = KeptBuffers(module, fact)
    return kept


def _candidates(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    norms = {name for name, part in module.named_modules() if isinstance(part, _NormBase)}
    return [
        (name, buffer)
        for name, buffer in saved_buffers(module)
        if name.rpartition(".")[0] not in norms
    ]


def _write_down(probe: Probe, fact: UsedBuffers, buffers: list[torch.Tensor]) -> None:
    fact.steps.append(probe.steps_done)
    fact.prints.append(take(buffers, fact.counts))


def _follow(
    probe: Probe, kept: KeptBuffers, module: torch.nn.Module, buffers: list[torch.Tensor]
) -> None:
    """Until this forward ends, see what its results follow from."""
    if not hasattr(TorchDispatchMode, _NEEDED):
        return
    if torch._C._len_torch_dispatch_stack():
        return  # the program may leave a mode of its own while ours is the last that was entered
    flow = Dataflow(buffers, probe.harmlessly)

    def end(_: torch.nn.Module, __: Any, results: Any) -> None:
        handle.remove()
        flow.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        probe.harmlessly(_note_used, probe, kept, flow, results)

    # Also after an error: `results` is None then.
    handle = module.register_forward_hook(end, always_call=True)
    flow.__enter__()  # type: ignore[no-untyped-call]


def _note_used(probe: Probe, kept: KeptBuffers, flow: Dataflow, results: Any) -> None:
    if kept.fact is None or results is None:
        return
    places = flow.reaches(results) - flow.stores
    kept.fact.used = [name for place, name in enumerate(kept.fact.names) if place in places]
    if not places:
        probe.ledger.buffers_used.remove(kept.fact)
        kept.fact = None
