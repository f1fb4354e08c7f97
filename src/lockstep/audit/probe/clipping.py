# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping, loss scaling and learning-rate schedules."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.probe import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe


_SCALES_KEPT = 256
"""Calls of ``GradScaler.step``, the last ones."""


def install(probe: Probe) -> None:
    """Watch ``clip_grad_norm_``, ``GradScaler.step`` and schedulers."""
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        probe.patches.wrap(module, "clip_grad_norm_", functools.partial(_clipper, probe))
    probe.patches.wrap(torch.amp.GradScaler, "step", functools.partial(_scaler, probe))


def _clipper(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not probe.detailed or probe.inside("clip"):
            return original(*args, **kwargs)
        probe.enter("clip")
        try:
            norm = original(*args, **kwargs)
        finally:
            probe.enter("clip", -1)
        largest = args[1] if len(args) > 1 else kwargs.get("max_norm")
        if isinstance(norm, torch.Tensor) and hasattr(norm, "full_tensor"):
            return norm
        clip = {
            "norm": float(norm),
            "max_norm": float(largest) if isinstance(largest, int | float) else None,
            "where": users_lines(),
            "backwards": 0,
        }
        for window in probe.each_window():
            if len(window.clips) < Window.LIMIT:
                window.clips.append({**clip, "backwards": len(window.backwards)})
        return norm

    return watched


def _scaler(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    number = 0

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        if probe.detailed and self.is_enabled():
            probe.scale = float(self.get_scale())
            facts = probe.ledger.facts
            if "scaled_at" not in facts:
                facts["scaled_at"] = users_lines()
            scales = facts.setdefault("scales", {})
            scales[str(number)] = probe.scale  # as JSON will have it
            scales.pop(str(number - _SCALES_KEPT), None)
        try:
            return original(self, *args, **kwargs)
        finally:
            probe.scale = None

    return watched
