# SPDX-License-Identifier: Apache-2.0
"""`Report`: the result of one worker's `train` or `validate`, or the known part of a lost one's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.keys import NUM_SAMPLES
from lockstep.metrics import AverageMeterCollection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.audit.ledger import Ledger
    from lockstep.metrics.step_log import StepRow


@dataclass(frozen=True)
class StartReport:
    """The result of one worker's `start` or `stand_by`.

    Attributes:
        pid: the id of its process.
        device: the device that it computes on.
        steps_per_epoch: global batches of each loader that the operator registered, by purpose;
            None for data without a length.
    """

    pid: int
    device: str
    steps_per_epoch: Mapping[str, int | None]


@dataclass(frozen=True)
class Report:
    """The result of one worker's `train` or `validate`.

    Attributes:
        metrics: the results of the operator's loop, one for each pass over (part of) an epoch.
        summaries: the result of lockstep's own loop inside it; None where that did not run.
        sums: the sums behind the summaries, over the whole call (see `lockstep.metrics.merge`).
        samples_by_pass: this worker's samples in each pass.
        samples: samples of this worker, each counted once.
        steps: global batches.
        epoch: passes over the training data begun, this call's included; None for `validate`.
        timers: seconds by phase; None unless asked for (`profile`).
        weighed_by: the kind of weight of the losses in lockstep's own loops; None without losses.
        measured: the registered torchmetrics objects, by the key of their result.
        seen: the records of the audit (see `lockstep.worker.run_audit`); None without an audit.
        rows: metrics of single steps.
        is_of_a_lost_worker: the driver made this report in the name of a lost worker.
    """

    metrics: list[dict[str, Any]]
    summaries: list[dict[str, Any] | None]
    sums: dict[str, Any]
    samples_by_pass: list[int]
    samples: int
    steps: int
    epoch: int | None
    timers: dict[str, float] | None
    weighed_by: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    seen: Ledger | None = None
    rows: list[StepRow] = field(default_factory=list)
    is_of_a_lost_worker: bool = False


@dataclass(frozen=True)
class LoopCounts:
    """The samples and sums that a worker had counted at its last status.

    Attributes:
        samples: samples committed in the call.
        sums: see `Report.sums`.
    """

    samples: int
    sums: dict[str, Any]


def report_of_lost_worker(samples: int, counted: LoopCounts | None) -> Report:
    """The report of a lost worker: its samples, and the metrics that the driver has received.

    The steps that the worker had committed are in the weights of all ranks; only its metrics of the
    latest steps are missing from the means.
    """
    sums = AverageMeterCollection().state() if counted is None else counted.sums
    return Report(
        metrics=[],
        summaries=[],
        sums={**sums, NUM_SAMPLES: samples},
        samples_by_pass=[],
        samples=samples,
        steps=0,
        epoch=None,
        timers=None,
        is_of_a_lost_worker=True,
    )
