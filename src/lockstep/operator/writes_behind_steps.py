# SPDX-License-Identifier: Apache-2.0
"""`WritesBehindSteps`: which of a rank's writes lie behind the optimizer's step, and are no step.

A hook behind a step may write to weights (a target network) on the ranks alone that had samples of
the batch; a hook behind an epoch, on the ranks alone that have come to it. Until all ranks have the
writes, two ranks at the same step hold different weights. Such a rank tells so when its group has
broken, and the rank that has written is then further than one that has not (see
`lockstep.worker.group_rejoin`).
"""

from __future__ import annotations

from typing import NamedTuple


class WrittenBehind(NamedTuple):
    """What a rank has written behind its last step; a rank that has written more has a larger one.

    Attributes:
        has_last_step: it has the writes that belong to the last step.
        ended_epochs: the epochs whose end it has written.
    """

    has_last_step: bool = True
    ended_epochs: int = 0


class WritesBehindSteps:
    """A rank's account of them.

    Attributes:
        are_unshared: since the ranks were last alike, there was a step of which some ranks have not
            made the writes; the same on every rank.
        ended_epochs: the epochs whose end this rank has written.
    """

    def __init__(self) -> None:
        self.are_unshared = False
        self.ended_epochs = 0
        self._missed_step: int | None = None

    def note_unshared(self, step: int, *, has_written: bool) -> None:
        """Note that some ranks alone make the writes behind `step`, this rank if `has_written`.

        A step that is undone later has no writes either: it is not among the committed ones. Those
        of a later step do not make up for what this rank has missed.
        """
        self.are_unshared = True
        if not has_written and (self._missed_step is None or step < self._missed_step):
            self._missed_step = step

    def note_shared(self) -> None:
        """Note that all ranks are alike again."""
        self.are_unshared, self._missed_step = False, None

    def written(self, committed: int) -> WrittenBehind:
        """What this rank has written behind step `committed`, its last one."""
        has_missed = self._missed_step is not None and self._missed_step <= committed
        return WrittenBehind(not has_missed, self.ended_epochs)
