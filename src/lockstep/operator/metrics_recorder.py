# SPDX-License-Identifier: Apache-2.0
"""`MetricsRecorder`: collects the metrics of the default loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.metrics import AverageMeterCollection, merge
from lockstep.metrics.average_meters import ValidationMeters
from lockstep.tensor_copies import is_shard

if TYPE_CHECKING:
    from lockstep.operator.operator_state import OperatorState


class MetricsRecorder:
    """Metrics of one pass, for the caller of the loop, and of the whole call, for the driver.

    A mean of means is wrong on uneven shards, so workers send sums. A call may touch several
    epochs, and the user's own `train_epoch` around ours gets each pass's summary, as a plain
    dict to extend; for entries that it does not change, the driver computes the mean from the sums.
    """

    def __init__(self, state: OperatorState) -> None:
        self._state = state
        is_validation = state.global_batch.purpose == "validation"
        self._pass = ValidationMeters() if is_validation else AverageMeterCollection()
        # In the first pass of a call both are one collection, so that nothing is counted twice.
        if state.meters.is_empty:
            state.meters = self._pass
        self._call = state.meters

    def add(self, metrics: dict[str, Any]) -> None:
        """Count the metrics of the current batch.

        Collective:
            Every rank, for each norm or sum of weights in shards among them: an all-reduce. So it
            is read here, also of a borrowed batch, whose metrics count nothing.
        """
        metrics = {name: _reduced(value) for name, value in metrics.items()}
        global_batch, log = self._state.global_batch, self._state.step_log
        samples = global_batch.num_samples_of(metrics)
        partial, global_batch.partial_weights = global_batch.partial_weights, {}
        if log is not None and global_batch.purpose == "train":
            log.add(metrics, samples, partial)
        both = (self._pass,) if self._call is self._pass else (self._pass, self._call)
        for meters in both:
            # The number in the run: a worker that joined after a failure has seen fewer batches.
            meters.begin_step(self._state.committed + 1)
            meters.update(metrics, n=samples, partial=partial)
        self._state.latest = metrics

    def summary(self) -> dict[str, Any]:
        """The metrics of the pass so far."""
        sums = self._state.pass_sums = self._pass.state()
        return merge([sums])


def _reduced(metric: Any) -> Any:
    return metric.item() if is_shard(metric) and metric.numel() == 1 else metric
