# SPDX-License-Identifier: Apache-2.0
"""Backwards: where they are called, what their losses weigh, which reducers ran in them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._functorch import maybe_current_level

from lockstep import reduction_context
from lockstep.audit.facts import Backward
from lockstep.audit.probe import gathers, scattered
from lockstep.audit.probe.batches import BATCHES
from lockstep.audit.probe.called import note_mode
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.increments import recorded
from lockstep.audit.probe.loss_graph import factor_of, nearest_parameters, terms_of
from lockstep.audit.probe.optimizers import fingerprint_gradients, gradient_versions, watch_made

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.facts import Loading
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.probe.probe import Probe

_WITHOUT_STEP: Final = 512
"""Backwards before the first step of an optimizer of torch's: then there may be none."""


def install(probe: Probe) -> None:
    """Watch ``torch.autograd.backward``, which ``Tensor.backward`` calls, and ``autograd.grad``."""
    for kind in ("backward", "grad"):
        probe.patches.wrap(torch.autograd, kind, functools.partial(_watch, probe, kind))


def _watch(
    probe: Probe, kind: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not probe.is_on or probe.is_elsewhere():
        return original(*args, **kwargs)
    if kind == "backward":
        probe.count_backward()
        if probe.trains_on is not None:
            _note_use(probe.trains_on)
    if not probe.detailed or probe.in_backward or maybe_current_level() is not None:
        # Inside a transform of torch.func tensors have no numbers to read.
        return original(*args, **kwargs)
    record = Backward(kind, users_lines())
    roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
    place, name = (1, "grad_tensors") if kind == "backward" else (2, "grad_outputs")
    given = args[place] if len(args) > place else kwargs.get(name)
    probe.harmlessly(_describe, probe, record, roots, given)
    record.before = probe.harmlessly(_fingerprint_before, probe) or {}
    written = probe.harmlessly(gradient_versions, probe) or {}
    if kind == "backward":  # and not a look at the gradients of an input
        probe.harmlessly(note_mode, probe)
    before = {wrapper.key: wrapper.issued() for wrapper in probe.wrappers}
    probe.in_backward = True
    try:
        with recorded(probe, record):
            return original(*args, **kwargs)
    finally:
        probe.in_backward = False
        probe.following.undo()
        probe.harmlessly(probe.passing_back.close)
        probe.harmlessly(_note_reducers, probe, record, before)
        probe.harmlessly(_remember, probe, record, written)
        if not probe.steps_done and probe.ledger.facts.backwards > _WITHOUT_STEP:
            probe.look(closely=False)


def _fingerprint_before(probe: Probe) -> dict[str, Fingerprint]:
    """With gradients that lockstep keeps out of a backward which it runs itself."""
    current = reduction_context.active()
    earlier = {} if current is None else current.earlier
    return fingerprint_gradients(probe, earlier)


def _note_use(loading: Loading) -> None:
    loading.training = True
    last = len(loading.batches) - 1
    # The last place that is written down stands for all later batches.
    if 0 <= last < BATCHES - 1 and loading.used[-1:] != [last]:
        loading.used.append(last)


def _describe(probe: Probe, record: Backward, roots: Any, given: Any) -> None:
    root = roots[0] if isinstance(roots, list | tuple) and len(roots) == 1 else roots
    if not isinstance(root, torch.Tensor) or root.numel() != 1 or root.is_meta:
        return
    given = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
    alone = isinstance(given, torch.Tensor) and given.numel() == 1
    weight = float(given.detach()) if alone else 1.0
    if probe.sync_of_lockstep():
        probe.ledger.facts.lockstep = True  # it may be detached when the script ends
        weight = 1.0  # what the batch counts for, which the reduction divides by
    weight /= _scale_of(probe, root)
    try:
        record.loss = float(root.detach())
        record.factor = factor_of(root, weight)
        record.terms = terms_of(root, weight)
        record.heads = _names(probe, nearest_parameters(root))
        gathers.describe(probe, record, root, weight)
    except RuntimeError:  # saved tensors are gone: a second backward through the same graph
        record.terms = []


def _scale_of(probe: Probe, loss: torch.Tensor) -> float:
    """The factor by which a GradScaler multiplied this loss, 1 for any other loss.

    It weighs no sample: the scaler divides the gradients by it.
    """
    known = (scale for reference, scale in probe.scaled if reference() is loss)
    return next(known, 1.0) or 1.0  # 0 where overflows have halved it too often


def _names(probe: Probe, parameters: list[torch.Tensor]) -> list[str]:
    watch_made(probe)
    known = [watched.names for watched in probe.optimizers.values()]
    found = (next((n[id(p)] for n in known if id(p) in n), None) for p in parameters)
    return [name for name in found if name is not None]


def _note_reducers(probe: Probe, record: Backward, before: dict[str, int]) -> None:
    for wrapper in probe.wrappers:
        if wrapper.ref() is None or wrapper.key not in before:
            continue
        use = wrapper.use(before[wrapper.key])
        record.wrappers[wrapper.key] = use
        if use.issued > 0 or use.no_sync:
            # Armed again by its next forward. One that issued nothing still waits.
            wrapper.is_armed = wrapper.was_unsynced = False


def _remember(probe: Probe, record: Backward, written: dict[str, list[object]]) -> None:
    if record.kind == "backward":
        probe.recent.has_forward = False
        for window in probe.each_window():
            window.has_called = False
    now = gradient_versions(probe)
    record.touched = [key for key, versions in now.items() if versions != written.get(key)]
    record.gradients = fingerprint_gradients(probe)
    probe.harmlessly(scattered.note_left, probe, record)
    probe.remember("backwards", record)
