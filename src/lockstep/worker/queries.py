# SPDX-License-Identifier: Apache-2.0
"""What others want to know of a worker. Nothing here changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.metrics.metric_values import as_number
from lockstep.worker.worker_status import status_of_thread

if TYPE_CHECKING:
    from lockstep.metrics.step_log import StepRow
    from lockstep.operator import TrainingOperator
    from lockstep.worker.data_cursor import Cursor
    from lockstep.worker.loop_run import LoopRun
    from lockstep.worker.worker_status import WorkerStatus


class Queries:
    """The part of a worker that answers questions."""

    cursors: dict[str, Cursor]
    loop_run: LoopRun | None
    _operator: TrainingOperator | None
    _is_warm: bool

    def progress(self) -> dict[str, Any]:
        """Steps and samples so far, over all workers, in the call that runs; its latest loss."""
        call, operator = self.loop_run, self._operator
        if operator is None or call is None:
            return {}
        tally = call.tally
        placement = operator._lockstep.context.placement
        samples = tally.samples * placement.num_shards / len(placement.shards)
        latest = operator._lockstep.latest
        loss = as_number(latest.get("train_loss", latest.get("val_loss")))
        # A number: a driver without CUDA could not even receive a tensor that lives there.
        loss = None if loss is None else float(loss)
        return {"steps": tally.steps, "samples": samples, "loss": loss}

    def step_rows(self, since: int) -> tuple[int, list[StepRow]]:
        """Steps of the run so far, and the rows of metrics after step `since`."""
        operator = self._operator
        if operator is None or operator._lockstep.step_log is None:
            return 0, []
        committed = operator._lockstep.committed  # first: rows of steps up to it are there
        return committed, operator._lockstep.step_log.newer_than(since)

    def items_ahead(self, purpose: str, shards: list[int]) -> list[Any]:
        """What the next step reads for `shards`: indices into the dataset, where there are any."""
        cursor = self.cursors[purpose]
        return cursor.source.items_of(cursor.epoch, cursor.step, shards)

    def samples_of(self, purpose: str, segments: list[tuple[range, int, int]]) -> int | None:
        """Samples that shards held in steps of an epoch; None where nobody can tell.

        Args:
            segments: (shards, first step, number of steps); steps go on into the next epoch.
        """
        source = self.cursors[purpose].source
        counts = [source.samples_of(*segment) for segment in segments]
        return None if None in counts else sum(count or 0 for count in counts)

    def position(self) -> tuple[int, int, int]:
        """Passes over the training data begun and finished, and the steps of the run."""
        cursor = self.cursors.get("train")
        if cursor is None:
            return 0, 0, self._committed
        return cursor.epochs_entered, cursor.epochs_finished, self._committed

    def where(self, thread_id: int) -> WorkerStatus:
        """What the thread that trains is doing, seen from another one."""
        call = self.loop_run
        if call is None:
            return status_of_thread(thread_id, 0, None, is_warm=False)
        is_warm = self._is_warm or call.own_steps > 0
        return status_of_thread(thread_id, call.tally.steps, call.counted, is_warm=is_warm)

    def steps_ahead(self, purpose: str, num_steps: int | None) -> int | None:
        """Global batches that the next call will make; None if the data has no length."""
        if num_steps is not None:
            return num_steps
        cursor = self.cursors[purpose]
        total = cursor.source.steps_per_epoch
        return None if total is None else total - cursor.step

    @property
    def _committed(self) -> int:
        return 0 if self._operator is None else self._operator._lockstep.committed
