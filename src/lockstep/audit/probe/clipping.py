# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping, loss scaling and learning-rate schedules."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.audit.facts import Clip
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.optimizers import watch_made

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe


_ITERATORS = 8
"""So many are remembered, the last ones, to know one that is handed over again."""

_SCALES_KEPT = 256
"""Calls of ``GradScaler.step``, the last ones."""


def install(probe: Probe) -> None:
    """Watch clipping and ``GradScaler.step``."""
    modules = (torch.nn.utils.clip_grad, torch.nn.utils)
    read: deque[Any] = deque(maxlen=_ITERATORS)
    by_norm = functools.partial(_clip, probe, read, "max_norm", _by_norm)
    by_value = functools.partial(_clip, probe, read, "clip_value", _by_value)
    probe.patches.wrap_in_each(modules, "clip_grad_norm_", by_norm)
    probe.patches.wrap_in_each(modules, "clip_grad_value_", by_value)
    stepping = functools.partial(_step, probe, itertools.count(1))
    probe.patches.wrap(torch.amp.GradScaler, "step", stepping)
    probe.patches.wrap(torch.amp.GradScaler, "scale", probe.afterwards(_note_scaled))


def _clip(
    probe: Probe,
    read: deque[Any],
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
    held = _read(read, given["parameters"])
    # As the program called it, with the parameters as a list.
    tensors = held.tensors
    args, kwargs = (
        ((tensors, *args[1:]), kwargs) if args else (args, kwargs | {"parameters": tensors})
    )
    return clip(probe, held, given[limit], functools.partial(original, *args, **kwargs))


class _Held(NamedTuple):
    """What was handed over to be clipped; `is_spent`: an iterator that an earlier call has read."""

    tensors: list[torch.Tensor]
    is_spent: bool


def _read(earlier: deque[Any], held: Any) -> _Held:
    """An iterator has one reader."""
    if isinstance(held, torch.Tensor):
        return _Held([held], is_spent=False)
    is_spent = any(held is each for each in earlier)
    if isinstance(held, Iterator) and not is_spent:
        earlier.append(held)
    return _Held(list(held), is_spent)


def _by_norm(probe: Probe, held: _Held, largest: Any, clip: Callable[[], Any]) -> Any:
    with probe.counted("clip"):
        norm = clip()
    if not hasattr(norm, "full_tensor"):
        probe.harmlessly(_note_norm, probe, held, norm, largest)
    return norm


def _note_norm(probe: Probe, held: _Held, norm: Any, largest: Any) -> None:
    is_clipped = isinstance(largest, int | float) and float(norm) > largest
    _note(probe, held, float(norm), is_clipped, largest / float(norm) if is_clipped else 1.0)


def _note(probe: Probe, held: _Held, norm: float, is_clipped: bool, factor: float = 1.0) -> None:
    watch_made(probe)
    ids = set(map(id, held.tensors))
    watched = [w for w in probe.optimizers.values() if not ids.isdisjoint(w.names)]
    clip = Clip(norm, is_clipped, factor, users_lines(), [w.track.key for w in watched])
    if norm == 0.0 and (watched or held.is_spent):
        clip.missed = [name for w in watched for key, name in w.names.items() if key in ids]
    probe.remember("clips", clip)


def _by_value(probe: Probe, held: _Held, largest: Any, clip: Callable[[], Any]) -> Any:
    probe.harmlessly(_note_by_value, probe, held, largest)
    return clip()


def _note_by_value(probe: Probe, held: _Held, clip_value: float) -> None:
    gradients = [p.grad.detach() for p in held.tensors if p.grad is not None]
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
