# SPDX-License-Identifier: Apache-2.0
"""`Report`: the result of one worker's `train` or `validate`, or the known part of a lost one's."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lockstep.keys import NUM_SAMPLES
from lockstep.metrics import AverageMeterCollection, merge
from lockstep.metrics.metric_values import is_same_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.audit.ledger import Ledger
    from lockstep.metrics.step_log import StepRow
    from lockstep.metrics.weighted_mean import WeightedMean
    from lockstep.operator.shadow import ShadowCheck


@dataclass(frozen=True)
class StartReport:
    """The result of one worker's `start` or `stand_by`.

    Attributes:
        pid: the id of its process.
        device: the device that it computes on.
        steps_per_epoch: global batches of each loader that the operator registered, by purpose;
            None for data without a length.
        units: the parts of models in shards that are gathered and freed together, by name.
        has_schedulers: whether the operator registered any.
        changes_in_validation: whether a validation may change what a checkpoint holds.
        sources: the digests of the modules of the user's program; see `source_digests`.
    """

    pid: int
    device: str
    steps_per_epoch: Mapping[str, int | None]
    units: Sequence[str] = ()
    has_schedulers: bool = False
    changes_in_validation: bool = False
    sources: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PassResult:
    """The result of one worker's pass over (part of) an epoch.

    Attributes:
        metrics: the result of the operator's loop.
        sums: the sums of lockstep's own loop inside it (see `lockstep.metrics.merge`); None where
            that did not run.
        samples: this worker's samples.
        over_call: the names of the metrics that cover the call from its beginning, and not this
            pass alone; they are equal on all workers.
    """

    metrics: dict[str, Any]
    sums: dict[str, Any] | None
    samples: int
    over_call: frozenset[str] = frozenset()

    @cached_property
    def keys_of_own(self) -> set[str]:
        """The metrics that the user's own loop returned, added to lockstep's loop or changed."""
        ours = self._means()
        return {
            key
            for key, value in self.metrics.items()
            if key not in ours or not _is_same_value(ours[key], value)
        }

    @cached_property
    def keys_left_out(self) -> set[str]:
        """The metrics of lockstep's loop that the user's own loop around it did not return."""
        return self._means().keys() - self.metrics.keys()

    def _means(self) -> dict[str, Any]:
        return {} if self.sums is None else merge([self.sums])

    def __getstate__(self) -> dict[str, Any]:
        # Found before it is sent: the driver would find them for one worker after the other.
        return vars(self) | {
            "keys_of_own": self.keys_of_own,
            "keys_left_out": self.keys_left_out,
        }

    def weight_of(self, key: str) -> tuple[int, float] | None:
        """What lockstep's loop has weighed metric `key` by; None if it did not average one.

        Returns:
            The step whose mean it is, and the weight; step 0 for a mean over the pass.
        """
        means: dict[str, WeightedMean] = {} if self.sums is None else self.sums["sums"]
        if key in means:
            return 0, means[key].weight
        latest = means.get(key.removeprefix("last_")) if key.startswith("last_") else None
        return None if latest is None else (latest.last_step, latest.last_weight)


def _is_same_value(before: Any, after: Any) -> bool:
    # NaN is not equal to itself.
    if before is after:
        return True
    if isinstance(before, float) and isinstance(after, float):
        return before == after or (before != before and after != after)
    return isinstance(after, int | str | Tensor | np.ndarray) and is_same_value(before, after)


@dataclass(frozen=True)
class Report:
    """The result of one worker's `train` or `validate`.

    Attributes:
        passes: the results of the passes.
        sums: the sums behind the summaries, over the whole call (see `lockstep.metrics.merge`).
        samples: samples of this worker, each counted once.
        steps: global batches.
        epoch: passes over the training data begun, this call's included; None for `validate`.
        timers: seconds by phase; None unless asked for (`profile`).
        weighed_by: the kind of weight of the losses in lockstep's own loops; None without losses.
        torchmetrics: the registered torchmetrics objects, by the key of their result.
        audit_ledger: the records of the audit (see `lockstep.worker.run_audit`); None without one.
        rows: metrics of single steps.
        shadow_checks: the shards that two workers have computed in the call.
        is_of_a_lost_worker: the driver made this report in the name of a lost worker.
    """

    passes: list[PassResult]
    sums: dict[str, Any]
    samples: int
    steps: int
    epoch: int | None
    timers: dict[str, float] | None
    weighed_by: str | None = None
    torchmetrics: dict[str, Any] = field(default_factory=dict)
    audit_ledger: Ledger | None = None
    rows: list[StepRow] = field(default_factory=list)
    shadow_checks: Sequence[ShadowCheck] = ()
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
        passes=[],
        sums={**sums, NUM_SAMPLES: samples},
        samples=samples,
        steps=0,
        epoch=None,
        timers=None,
        is_of_a_lost_worker=True,
    )
