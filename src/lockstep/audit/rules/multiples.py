# SPDX-License-Identifier: Apache-2.0
"""What was kept of the ranks' gradients before a reduction and of those that were used after it.

They tell by what each rank's were multiplied on the way, whoever did it and wherever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from lockstep.audit.ledger import Step
    from lockstep.audit.prints import Fingerprint
    from lockstep.audit.shared_track import SharedTrack

_CLOSE: Final = {"float16": 5e-3, "bfloat16": 2e-2}
_CLOSE_OTHERWISE: Final = 1e-4
_CLOSE_AFTER_A_HOOK: Final = 2e-2
"""Hooks send half precision; a sum of two ranks is twice their mean."""
LEAST: Final = 3
"""So few elements would agree by chance."""


@dataclass(frozen=True)
class Samples:
    """`then`: (ranks, S) after the last backward; `used`: (S,) by the optimizers of all ranks.

    `tensors` (S,) tells of which parameter each of the S elements is, and `lengths` (ranks,) how
    long all of a rank's gradients were together.
    """

    then: np.ndarray[Any, Any]
    used: np.ndarray[Any, Any]
    tensors: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]
    ranks: list[int]
    close: float

    @property
    def parameters(self) -> list[int]:
        """The places of those of which there are enough elements, in the track's list."""
        places, counts = np.unique(self.tensors, return_counts=True)
        return [int(p) for p, count in zip(places, counts, strict=True) if count >= LEAST]

    def of(self, parameter: int) -> Samples:
        """The same of one parameter."""
        of_one = self.tensors == parameter
        return replace(
            self,
            then=self.then[:, of_one],
            used=self.used[of_one],
            tensors=self.tensors[of_one],
        )

    def are_used(self, values: np.ndarray[Any, Any]) -> bool:
        return bool(np.abs(self.used - values).max() <= self.close * np.abs(self.used).max())

    @property
    def were_equal(self) -> bool:
        spread = self.then.max(axis=0) - self.then.min(axis=0)
        return bool(spread.max() <= self.close * np.abs(self.then).max())


def samples_of(track: SharedTrack, steps: dict[int, Step]) -> Samples | None:
    then: dict[int, list[float]] = {rank: [] for rank in steps}
    used: dict[int, list[float]] = {rank: [] for rank in steps}
    close = _CLOSE_OTHERWISE
    tensors: list[int] = []
    for place, shared in enumerate(track.parameters):
        if shared.groups != [sorted(steps)]:
            continue
        close = max(close, _CLOSE.get(shared.dtype, 0.0))
        for rank, step in steps.items():
            last = _left_by_backward(step, track.key)
            if last is None or step.gradients is None:
                return None
            if step.backwards[-1].own:
                close = max(close, _CLOSE_AFTER_A_HOOK)
            then[rank] += track.sampled(last, shared, rank)
            used[rank] += track.sampled(step.gradients, shared, rank)
        tensors += [place] * (len(next(iter(then.values()))) - len(tensors))
    before, after = np.array(list(then.values())), np.array(list(used.values()))
    whole = np.isfinite(before).all(axis=0) & np.isfinite(after).all(axis=0)
    before, after = before[:, whole], after[:, whole]
    first = after[0]
    if np.count_nonzero(first) < LEAST or np.abs(before).max(axis=1).min() <= 1e-12:
        return None
    lengths = np.array([_length(step, track.key) for step in steps.values()])
    found = Samples(before, first, np.array(tensors)[whole], lengths, sorted(steps), close)
    return found if all(found.are_used(row) for row in after) else None


def _left_by_backward(step: Step, key: str) -> Fingerprint | None:
    """This rank's own gradients: as a communication hook was given them, or as backward left."""
    last = step.backwards[-1] if step.backwards else None
    if last is None or key in last.own:
        return None if last is None else last.own[key]
    if any(c.in_backward and c.before is not None and c.after is None for c in step.collectives):
        return None  # still on their way, they may have been written to while they were read
    return last.gradients.get(key)


def _length(step: Step, key: str) -> float:
    last = _left_by_backward(step, key)
    with np.errstate(over="ignore"):  # before a GradScaler has found its scale
        return 0.0 if last is None else float(np.linalg.norm(np.nan_to_num(last.norms)))


def factors_of(samples: Samples) -> np.ndarray[Any, Any] | None:
    """(tensors, ranks): by what each rank's gradients were multiplied before the average.

    None where what was used is no sum of multiples of them.
    """
    size = len(samples.ranks)
    factors = []
    for tensor in set(samples.tensors.tolist()):
        of_tensor = samples.tensors == tensor
        then, used = samples.then[:, of_tensor], samples.used[of_tensor]
        if then.shape[1] < size + LEAST or not used.any():
            continue
        found, _, rank, _ = np.linalg.lstsq(then.T, used, rcond=1e-6)
        if rank < size or np.abs(found @ then - used).max() > samples.close * np.abs(used).max():
            return None
        factors.append(size * found)
    return np.array(factors) if factors else None
