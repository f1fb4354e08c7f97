# SPDX-License-Identifier: Apache-2.0
"""Gradients that are added up and scattered: what went in, what came out, what backward left.

How long all gradients are is looked at only in programs that scatter outside backward, from their
first such call on: it costs as much as a norm for clipping.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lockstep.audit.fingerprint import lengths_of
from lockstep.audit.probe.names import outermost
from lockstep.audit.probe.passed_back import has_hooks

if TYPE_CHECKING:
    from lockstep.audit.facts import Backward, Collective
    from lockstep.audit.probe.probe import Probe


def note_given(probe: Probe, call: Collective, given: dict[str, Any]) -> None:
    """Such a call begins: how long is what this rank puts in, whole or in parts?"""
    put_in = given.get("input", given.get("input_list"))
    parts = list(put_in) if isinstance(put_in, list | tuple) else [put_in]
    if call.in_backward or not all(map(_is_real, parts)):
        return  # a library's own, layer by layer; or what no rule compares
    call.before = _length(parts)
    probe.scatters = True


def note_received(call: Collective, result: Any, given: dict[str, Any]) -> None:
    """It has ended: how long is this rank's part? Unknown where it is still on its way."""
    received = given.get("output")
    if call.before is not None and result is None and _is_real(received):
        call.after = _length([received])


def note_left(probe: Probe, record: Backward) -> None:
    """How long all gradients are that backward has left, of all models together and of each."""
    if not probe.scatters:
        return
    modules = probe.living_modules()
    if any(
        has_hooks(p) for module in modules for p in module._parameters.values() if p is not None
    ):
        return  # they may have divided already
    gradients: dict[int, torch.Tensor] = {}
    of_roots: list[list[int]] = []
    for root in outermost(modules):
        of_root = {id(p): p.grad for p in root.parameters() if _is_plain(p.grad)}
        gradients |= {known: grad for known, grad in of_root.items() if grad is not None}
        of_roots.append(list(of_root))
    lengths = dict(zip(gradients, lengths_of(list(gradients.values())), strict=True))
    record.left += [math.hypot(*(lengths[known] for known in each)) for each in of_roots if each]
    record.left.append(math.hypot(*lengths.values()))


def _is_real(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and not tensor.is_complex()


def _is_plain(gradient: torch.Tensor | None) -> bool:
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and not hasattr(gradient, "to_local")
        and not gradient.is_meta
        and not gradient.is_complex()
    )


def _length(tensors: list[Any]) -> float:
    return math.hypot(*lengths_of(tensors))
