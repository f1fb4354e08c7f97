# SPDX-License-Identifier: Apache-2.0
"""`SurvivorState`: how far a worker has come that is left when its group has broken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lockstep.operator.writes_behind_steps import WrittenBehind

if TYPE_CHECKING:
    from lockstep.worker.loop_run import LoopProgress
    from lockstep.worker.memory_checkpoint import MemoryCheckpoint, Part, TrainCall


class RunPosition(NamedTuple):
    """How far a worker has come; a worker that is further has a larger position.

    Attributes:
        steps: the committed steps of the run.
        epoch: the epoch of the training data.
    """

    steps: int
    epoch: int


@dataclass(frozen=True)
class SurvivorState:
    """How far a worker has come, after it has left its group.

    Attributes:
        position: how far its state has come; None if it has no state of the run (it is a spare, or
            an optimizer stepped in the middle of a batch that cannot be computed again).
        progress: the progress of the interrupted call; None without one.
        is_cut_short: a loop of the user's own failed after the last step's optimizers, so that its
            code after them did not run.
        written_behind: what it has written behind its last step, which not all ranks may have.
        num_batches_to_recompute: see `Worker`.
        other_places: epoch and step in data that is not for training, by purpose.
        held: the parts of memory checkpoints that it has, each with the rank whose part it is.
        calls: see `MemoryCheckpoints`.
        saved: see `MemoryCheckpoints`.
    """

    position: RunPosition | None
    progress: LoopProgress | None = None
    is_cut_short: bool = False
    written_behind: WrittenBehind = field(default_factory=WrittenBehind)
    num_batches_to_recompute: int = 0
    other_places: dict[str, tuple[int, int]] = field(default_factory=dict)
    held: tuple[tuple[MemoryCheckpoint, int], ...] = ()
    calls: tuple[TrainCall, ...] = ()
    saved: dict[tuple[int, int], Part] = field(default_factory=dict)
