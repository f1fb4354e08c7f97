# SPDX-License-Identifier: Apache-2.0
"""Clipping in hooks on parameters, which see a rank's own gradient before it is reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.audit.rules.base import Code, named

if TYPE_CHECKING:
    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Backward
    from lockstep.audit.shared_track import SharedTrack

BEFORE = Code("LS209", "clipped before the reduction", "warning")

_APART = 1e-3


def in_hooks(track: SharedTrack, number: int) -> Finding | None:
    """Did hooks cut gradients off, or make each rank's smaller by a factor of its own?"""
    steps = track.steps(number)
    for at_once in zip(*(s.backwards for s in steps.values()), strict=False):
        cut = _cut_off(at_once)
        names = sorted(cut | _scaled_apart(at_once))
        if names:
            how = "cut off their elements" if cut else "made them smaller, by factors that differ"
            return BEFORE.finding(
                f"step {number + 1}: hooks on {named(names)} were given each rank's own gradients "
                f"and {how}, before the wrapper averaged them",
                "clip after the last backward of the step has reduced the gradients, with "
                "`torch.nn.utils.clip_grad_value_` or `clip_grad_norm_`",
                rank=track.ranks,
                step=number + 1,
                parameters=names,
                evidence={str(r): b.hooked for r, b in zip(steps, at_once, strict=True)},
                where=[*at_once[0].where, *next(iter(steps.values())).where],
            )
    return None


def _cut_off(at_once: tuple[Backward, ...]) -> set[str]:
    return {name for b in at_once for name, seen in b.hooked.items() if "limit" in seen}


def _scaled_apart(at_once: tuple[Backward, ...]) -> set[str]:
    """Weights, as by counts, make the gradients of some ranks larger: that is no clipping."""
    found = set()
    for name in set.intersection(*(set(b.hooked) for b in at_once)):
        factors = [b.hooked[name].get("factor", 1.0) for b in at_once]
        if max(factors) <= 1.0 + _APART and max(factors) - min(factors) > _APART:
            found.add(name)
    return found
