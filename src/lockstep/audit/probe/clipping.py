# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping, loss scaling and learning-rate schedules."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from lockstep.audit.facts import Clip
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.optimizers import watch_made

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep.audit.probe.probe import Probe


_SCALES_KEPT = 256
"""Calls of ``GradScaler.step``, the last ones."""


def install(probe: Probe) -> None:
    """Watch clipping and ``GradScaler.step``."""
    modules = (torch.nn.utils.clip_grad, torch.nn.utils)
    by_norm = functools.partial(_clip, probe, "max_norm", _by_norm)
    by_value = functools.partial(_clip, probe, "clip_value", _by_value)
    probe.patches.wrap_in_each(modules, "clip_grad_norm_", by_norm)
    probe.patches.wrap_in_each(modules, "clip_grad_value_", by_value)
    stepping = functools.partial(_step, probe, itertools.count(1))
    probe.patches.wrap(torch.amp.GradScaler, "step", stepping)
    probe.patches.wrap(torch.amp.GradScaler, "scale", probe.afterwards(_note_scaled))


def _clip(
    probe: Probe,
    limit: str,
    clip: Callable[..., Any],
    original: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = dict(zip(("parameters", limit), args, strict=False)) | kwargs
    if not probe.detailed or probe.inside("clip") or not {"parameters", limit} <= given.keys():
        return original(*args, **kwargs)
    held = given["parameters"]  # an iterator has one reader
    held = [held] if isinstance(held, torch.Tensor) else list(held)
    # As the program called it, with the parameters as a list.
    args, kwargs = ((held, *args[1:]), kwargs) if args else (args, kwargs | {"parameters": held})
    return clip(probe, held, given[limit], functools.partial(original, *args, **kwargs))


def _by_norm(probe: Probe, held: list[torch.Tensor], largest: Any, clip: Callable[[], Any]) -> Any:
    with probe.counted("clip"):
        norm = clip()
    if not hasattr(norm, "full_tensor"):
        probe.harmlessly(_note_norm, probe, held, norm, largest)
    return norm


def _note_norm(probe: Probe, held: list[torch.Tensor], norm: Any, largest: Any) -> None:
    is_clipped = isinstance(largest, int | float) and float(norm) > largest
    _note(probe, held, float(norm), is_clipped, largest / float(norm) if is_clipped else 1.0)


def _note(
    probe: Probe, held: list[torch.Tensor], norm: float, is_clipped: bool, factor: float = 1.0
) -> None:
    watch_made(probe)
    ids = set(map(id, held))
    of = [w.track.key for w in probe.optimizers.values() if not ids.isdisjoint(w.names)]
    probe.remember("clips", Clip(norm, is_clipped, factor, users_lines(), of))


def _by_value(probe: Probe, held: list[torch.Tensor], largest: Any, clip: Callable[[], Any]) -> Any:
    probe.harmlessly(_note_by_value, probe, held, largest)
    return clip()


def _note_by_value(probe: Probe, held: list[torch.Tensor], clip_value: float) -> None:
    gradients = [p.grad.detach() for p in held if p.grad is not None]
    if gradients and not any(hasattr(g, "to_local") for g in gradients):
        is_clipped = any(bool((g.abs() > clip_value).any()) for g in gradients)
        _note(probe, held, float(torch.nn.utils.get_total_norm(gradients)), is_clipped)


def _note_scaled(probe: Probe, scaled: Any, args: Any, _: Any) -> None:
    if probe.detailed and args[0].is_enabled():
        losses = scaled if isinstance(scaled, list | tuple) else [scaled]
        scale = float(args[0].get_scale())
        probe.scaled += [(weakref.ref(x), scale) for x in losses if isinstance(x, torch.Tensor)]


def _step(
    probe: Probe,
    numbers: Iterator[int],
    original: Callable[..., Any],
    scaler: torch.amp.GradScaler,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    number = next(numbers)
    if probe.detailed and scaler.is_enabled():
        probe.scale = float(scaler.get_scale())
        facts = probe.ledger.facts
        facts.scaled_at = facts.scaled_at or users_lines()
        facts.scales[str(number)] = probe.scale  # as JSON will have it
        facts.scales.pop(str(number - _SCALES_KEPT), None)
    try:
        return original(scaler, *args, **kwargs)
    finally:
        probe.scale = None
