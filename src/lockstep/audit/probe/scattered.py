# SPDX-License-Identifier: Apache-2.0
"""Gradients that are added up and scattered: what went in, what came out, what backward left.

How long all gradients are is looked at only in programs that scatter outside backward, from their
first such call on: it costs as much as a norm for clipping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.audit.probe.names import outermost
from lockstep.audit.probe.passed_back import has_hooks

if TYPE_CHECKING:
    from lockstep.audit.ledger import Backward, Collective
    from lockstep.audit.probe.probe import Probe


def note_given(probe: Probe, call: Collective, args: Any, kwargs: Any) -> None:
    """Such a call begins: how long is what this rank puts in, whole or in parts?"""
    given = args[1] if len(args) > 1 else kwargs.get("input", kwargs.get("input_list"))
    parts = list(given) if isinstance(given, list | tuple) else [given]
    if call.in_backward or not all(isinstance(part, torch.Tensor) for part in parts):
        return  # a library's own, layer by layer
    call.before = _length(parts)
    probe.scatters = True


def note_received(call: Collective, result: Any, args: Any, kwargs: Any) -> None:
    """It has ended: how long is this rank's part? Unknown where it is still on its way."""
    received = args[0] if args else kwargs.get("output")
    if call.before is not None and result is None and isinstance(received, torch.Tensor):
        call.after = _length([received])


def note_left(probe: Probe, record: Backward) -> None:
    """How long all gradients are that backward has left, of all models together and of each."""
    if not probe.scatters:
        return
    modules = [m for r in probe.living if (m := r()) is not None]
    lengths: dict[int, float] = {}
    if any(
        has_hooks(p) for module in modules for p in module._parameters.values() if p is not None
    ):
        return  # they may have divided already
    for root in outermost(modules):
        of_root = {id(p): p.grad for p in root.parameters() if _is_plain(p.grad)}
        fresh = {known: grad for known, grad in of_root.items() if known not in lengths}
        lengths |= {known: _length([grad]) for known, grad in fresh.items()}
        if of_root:
            record.left.append(_together(lengths[known] for known in of_root))
    record.left.append(_together(lengths.values()))


def _is_plain(gradient: torch.Tensor | None) -> bool:
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and not hasattr(gradient, "to_local")
        and not gradient.is_meta
    )


def _length(tensors: list[Any]) -> float:
    with torch.no_grad():
        return _together(float(t.detach().double().norm()) for t in tensors)


def _together(lengths: Any) -> float:
    return float(sum(length**2 for length in lengths) ** 0.5)
