# SPDX-License-Identifier: Apache-2.0
"""Reads the progress of a call of `train` or `validate` from another thread while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.metrics.metric_values import as_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.metrics.step_log import StepRow
    from lockstep.operator.shadow import ShadowCheck
    from lockstep.worker.worker import Worker


@dataclass(frozen=True)
class ProgressReport:
    """The progress of a running call, for the driver.

    Attributes:
        steps: committed global batches of this call.
        samples: their samples, over all workers.
        loss: the loss of rank 0's latest batch; None before the first batch.
        total_steps: global batches that the call will commit; None if that is unknown.
        rows: for every worker the step of the run up to which it has all rows of metrics, and those
            that the driver has not received yet; None without metrics of single steps.
        wrong_shards: those of the call in which two workers have computed different bits.
    """

    steps: int = 0
    samples: float = 0
    loss: float | None = None
    total_steps: int | None = None
    rows: Sequence[tuple[int, Sequence[StepRow]]] | None = None
    wrong_shards: Sequence[ShadowCheck] = ()


def progress_of(worker: Worker) -> ProgressReport:
    """Steps and samples so far, over all workers, in the latest call; its latest loss."""
    call = worker.loop_run
    if call is None or not worker.is_built:
        return ProgressReport()
    state = worker.operator._lockstep
    assignment = state.context.shard_assignment
    samples = call.committed.samples * assignment.num_shards / len(assignment.shards)
    loss = as_number(state.latest.get("train_loss", state.latest.get("val_loss")))
    # A number: a driver without CUDA cannot unpickle a CUDA tensor.
    return ProgressReport(
        call.committed.steps,
        samples,
        None if loss is None else float(loss),
        call.total_steps,
        wrong_shards=[each for each in state.shadow.checks if each.wrong] if state.shadow else (),
    )


def rows_after(worker: Worker, step: int) -> tuple[int, Sequence[StepRow]]:
    """The step up to which the worker has all rows of metrics, and those after step `step`."""
    state = worker.operator._lockstep if worker.is_built else None
    if state is None or state.step_log is None:
        return 0, []
    return state.step_log.rows_after(step)
