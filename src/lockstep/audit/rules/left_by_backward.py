# SPDX-License-Identifier: Apache-2.0
"""What backwards made of gradients, and whether the optimizer used them so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from lockstep.audit.facts import Backward, Step
    from lockstep.audit.prints import Fingerprint

_KEPT: Final = 1e-3


def left_by(step: Step, key: str) -> Fingerprint | None:
    """An optimizer's gradients when the step's last backward returned."""
    return step.backwards[-1].gradients.get(key) if step.backwards else None


def uses_what_backward_left(step: Step, key: str) -> bool:
    """Nobody has divided some of them since; a norm that is clipped makes all alike smaller."""
    left = left_by(step, key)
    if left is None or step.gradients is None:
        return False
    norms, used = np.nan_to_num(left.norms), np.nan_to_num(step.gradients.norms)
    if norms.shape != used.shape or not norms.any():
        return False
    there = norms > 0.0
    ratios = used[there] / norms[there]
    whole = float(ratios[0]) if any(clip.is_clipped for clip in step.clips) else 1.0
    return bool(np.allclose(ratios, whole, rtol=_KEPT, atol=0.0))


def adding_backwards(step: Step, key: str) -> list[Backward]:
    """Those that changed these gradients: not ``autograd.grad``, nor another model's loss."""
    return [b for b in step.backwards if _adds(b, key)]


def _adds(backward: Backward, key: str) -> bool:
    before, after = backward.before.get(key), backward.gradients.get(key)
    if backward.kind != "backward" or before is None or after is None:
        return False
    return bool((before.hashes != after.hashes).any())
