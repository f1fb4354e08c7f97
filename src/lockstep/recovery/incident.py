# SPDX-License-Identifier: Apache-2.0
"""`Incident`: the record of one recovery, for `trainer.status()` and the log."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Incident:
    """A failure of the process group, and the recovery from it.

    Attributes:
        at: the time of the recovery, in seconds since 1970.
        lost: the lost workers, with their ranks.
        why: the causes of the losses.
        during: the remote method, and the last known phase of the lost workers.
        step: the committed steps of the run; none of them is lost.
        replayed: steps that were computed again: the one that was interrupted, if any was, and
            under ``sync="fsdp"`` those since the checkpoint.
        seconds: from the first sign of the failure until the next generation had formed.
        generation: the number of that generation.
        workers: the size of that generation.
        same_bits: the run still ends with the bits of an undisturbed run.
        checkpoint: the one on the disk that the run went back to, because a part of the state was
            lost with all workers that had it; None if it did not have to.
    """

    at: float
    lost: tuple[str, ...]
    why: str
    during: str
    step: int
    replayed: int
    seconds: float
    generation: int
    workers: int
    same_bits: bool
    checkpoint: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        who = f"lost {', '.join(self.lost)} ({self.why})" if self.lost else self.why
        bits = (
            "the same bits as undisturbed" if self.same_bits else "other bits, the same objective"
        )
        steps = "step" if self.replayed == 1 else "steps"
        workers = "worker" if self.workers == 1 else "workers"
        source = f" from {self.checkpoint}" if self.checkpoint else ""
        return (
            f"recovered in {self.seconds:.2f} s: {who} during {self.during}, after step"
            f" {self.step}; {self.replayed} {steps} computed again{source}, none lost; generation"
            f" {self.generation} has {self.workers} {workers}; {bits}"
        )
