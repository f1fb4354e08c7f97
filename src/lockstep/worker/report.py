# SPDX-License-Identifier: Apache-2.0
"""What one worker brings back from `train` or `validate`, and what is known of a lost one."""

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
    """What one worker brings back from `start` or `stand_by`.

    Attributes:
        pid: of its process.
        device: where it computes.
        steps_per_epoch: of each loader that the operator registered, by purpose; None for data
            without a length.
    """

    pid: int
    device: str
    steps_per_epoch: Mapping[str, int | None]


@dataclass(frozen=True)
class Report:
    """What one worker brings back from `train` or `validate`.

    Attributes:
        metrics: what the operator's loop returned, one entry a pass over (part of) an epoch.
        summaries: what lockstep's own loop had returned inside it; None where it did not run.
        sums: the sums behind the summaries, over the whole call (see `lockstep.metrics.merge`).
        samples_by_pass: this worker's samples in each pass.
        samples: samples of this worker, each counted once.
        steps: global batches.
        epoch: passes over the training data begun, this call's included; None for `validate`.
        timers: seconds by phase; None unless asked for (`profile`).
        weighed_by: what the losses of lockstep's own loops counted for; None if there were none.
        measured: the registered torchmetrics objects, by the key of their result.
        seen: what the audit saw (see `lockstep.worker.run_audit`); None without an audit.
        rows: metrics of single steps that the driver has not got yet.
        is_of_a_lost_worker: the driver made it, of what it knew of a worker that is lost.
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
    """What a worker had counted when it was last asked.

    Attributes:
        samples: delivered and committed in the call.
        sums: as `Report.sums`.
    """

    samples: int
    sums: dict[str, Any]


def report_of_lost_worker(samples: int, counted: LoopCounts | None) -> Report:
    """The report of a worker that is lost: its samples, and the metrics that the driver has got.

    The steps that it had committed are in the weights of all ranks; only its metrics of the
    latest ones are missing from the means.
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
