# SPDX-License-Identifier: Apache-2.0
"""`Cursor`, a position in a worker's data, and `Tally`, the steps and samples of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.phases import Phase, in_phase

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from lockstep.data import Step
    from lockstep.group import Group


class StepSource(Protocol):
    """A loader cut into global steps; see `lockstep.data.ShardedLoader`.

    Attributes:
        joint: a worker's shards of a step come as one batch, not one after the other.
    """

    joint: bool

    @property
    def global_batch_size(self) -> int | None: ...

    @property
    def steps_per_epoch(self) -> int | None: ...

    def batches(self, epoch: int, start_step: int = 0) -> Generator[Step, None, None]: ...

    def agree(self, group: Group, epoch: int) -> None:
        """Before an epoch's first step: every rank is about to read by the same plan.

        Collective:
            Every rank of `group`; one small exchange.
        """

    def samples_of(self, shards: Sequence[int], first_step: int, steps: int) -> int | None:
        """Samples of `shards` in `steps` steps from `first_step` on, into further epochs.

        None where the source cannot tell.
        """

    def items_of(self, epoch: int, step: int, shards: Sequence[int]) -> list[Any]:
        """The items that `shards` hold in a step; empty where the source cannot tell."""

    def close(self) -> None: ...


class Cursor:
    """A position in a source that survives from one call to the next.

    Attributes:
        epoch: passes over the data completed, from 0.
        step: global batches committed in the current pass.
        window_start: the step with which the accumulation window that is open begins; `step`
            if none is.
    """

    def __init__(self, source: StepSource) -> None:
        self.source = source
        self.epoch = 0
        self.step = 0
        self.window_start = 0
        self._steps: Generator[Step, None, None] | None = None
        self._ahead: Step | None = None

    def move_to(self, epoch: int, step: int) -> None:
        self._abandon()
        self.epoch, self.step = epoch, step
        # Gradients of the batches before `step` are gone, also if `step` lies in what was the
        # middle of a window, with another `accumulate`.
        self.window_start = step

    def use(self, source: StepSource) -> None:
        """Read from `source` from now on, at the same position."""
        self._abandon()
        self.source.close()
        self.source = source

    def close(self) -> None:
        """End the loader's worker processes."""
        self._abandon()
        self.source.close()

    def _abandon(self) -> None:
        steps, self._steps, self._ahead = self._steps, None, None
        if steps is not None:
            # Closing the generator ends the loader's processes now, not at a garbage collection.
            steps.close()

    @in_phase(Phase.READING)
    def take(self) -> Step | None:
        """The step at the position; None at the end of the epoch."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return ahead
        if self._steps is None:
            self._steps = self.source.batches(self.epoch, self.step)
        return next(self._steps, None)

    def ends_before(self, index: int) -> bool:
        """Whether the epoch has no step `index`, which is the next one to be taken.

        Data without a length is read one step ahead.
        """
        total = self.source.steps_per_epoch
        if total is not None:
            return index >= total
        if self._ahead is None:
            self._ahead = self.take()
        return self._ahead is None

    def commit(self) -> None:
        self.step += 1

    @property
    def has_open_window(self) -> bool:
        """Of the accumulation window at the position some batches are committed, and not all."""
        return self.window_start != self.step

    @property
    def at_epoch_start(self) -> bool:
        return self.step == 0 and self._steps is None

    def finish_epoch(self) -> None:
        self.move_to(self.epoch + 1, 0)

    @property
    def epochs_entered(self) -> int:
        return self.epoch + (self.step > 0)

    @property
    def epochs_finished(self) -> int:
        """Passes completed; one at its last step counts, also before `finish_epoch`."""
        total = self.source.steps_per_epoch
        return self.epoch + (total is not None and 0 < total <= self.step)


@dataclass
class Tally:
    """Steps and samples that a worker has committed during one call.

    Attributes:
        steps: negative while the first batches of a window are computed again, which an earlier
            call has counted.
        on_commit: called after every step.
        at_boundary: called before every batch; an error that it raises ends the call between two
            steps.
    """

    steps: int = 0
    samples: int = 0
    on_commit: Callable[[], None] | None = None
    before_batch: Callable[[], None] | None = None
