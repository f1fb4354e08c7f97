# SPDX-License-Identifier: Apache-2.0
"""What one worker brings back from `train` or `validate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
