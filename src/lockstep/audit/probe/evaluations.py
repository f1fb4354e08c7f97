# SPDX-License-Identifier: Apache-2.0
"""The buffers with which a model is evaluated, as its forward begins.

Between two optimizer steps they are looked at once, and again where the program has written them
between two forwards, once, as a threshold that it calibrates. What it writes again and again is
state, and what forwards themselves write, as counts of a metric, is no part of the model.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

from torch.nn.parallel import DistributedDataParallel

from lockstep.audit.facts import Evaluation
from lockstep.audit.fingerprint import take
from lockstep.audit.prints import samples_per_tensor
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.records import Evaluated
from lockstep.sync.local_parameters import is_local_buffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from lockstep.audit.probe.probe import Probe
    from lockstep.audit.probe.records import Versions

_EVALUATIONS: Final = 200


def note_evaluation(probe: Probe, module: torch.nn.Module) -> None:
    """A forward of `module` begins, in evaluation."""
    if isinstance(module, DistributedDataParallel):
        return
    if probe.evaluated.step != probe.steps_done:
        probe.evaluated = Evaluated(probe.steps_done)
    known = probe.evaluated
    if known.module is None:
        if known.looks:
            known.looks -= 1
            if _write_down(probe, module):
                known.module = weakref.ref(module)
                known.before = known.written = _versions(module)
    elif known.module() is module and known.forwards:
        known.forwards -= 1
        now = _versions(module)
        # Equal before two forwards that follow one another: the first of them wrote nothing.
        if now != known.written and now == known.before:
            if known.again:
                # Written again and again, as state or in a sweep: not what it is evaluated with.
                del probe.ledger.evaluations[-2:]
                known.forwards = 0
            elif _write_down(probe, module):
                known.again, known.written = True, now
        known.before = now


def _write_down(probe: Probe, module: torch.nn.Module) -> bool:
    buffers = dict(saved_buffers(module))
    evaluations = probe.ledger.evaluations
    if not buffers or len(evaluations) >= _EVALUATIONS:
        return False
    counts = samples_per_tensor([b.numel() for b in buffers.values()])
    evaluations.append(
        Evaluation(
            step=probe.steps_done,
            module=type(module).__name__,
            names=list(buffers),
            counts=counts,
            buffers=take(list(buffers.values()), counts),
            where=users_lines(),
        )
    )
    return True


def _versions(module: torch.nn.Module) -> Versions:
    return [(id(b), 0 if b.is_inference() else b._version) for _, b in saved_buffers(module)]


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Numbers of its state dict that are not marked as local.

    Caches and masks are no part of a model.
    """
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None or name in part._non_persistent_buffers_set:
                continue
            if buffer.is_floating_point() and not is_local_buffer(part, name):
                yield f"{prefix}.{name}" if prefix else name, buffer
