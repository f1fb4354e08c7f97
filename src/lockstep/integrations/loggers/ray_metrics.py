# SPDX-License-Identifier: Apache-2.0
"""A logger that reports to Ray's metrics, which Ray's dashboard and Prometheus show."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import NotAvailableError
from lockstep.integrations.loggers.base import Logger, Row
from lockstep.integrations.optional_packages import import_optional
from lockstep.keys import NUM_SAMPLES

if TYPE_CHECKING:
    from lockstep.trainer import TorchTrainer

_LOSSES: Final = {"train": "train_loss", "validation": "val_loss"}

_GAUGES: Final = {
    "loss": "loss of the latest batch of rank 0 while a call runs, then the mean of the call",
    "samples_per_second": "samples a second over all workers, in the latest call; 0 after the run",
    "workers": "workers that train; 0 after the run",
    "step": "optimizer steps (global batches) since the run began",
    "metric": "numbers that train and validate return, by name",
}
_COUNTERS: Final = {
    "samples": "samples computed by this program",
    "recoveries": "recoveries from the loss of a worker",
}


class RayMetricsLogger(Logger):
    """Loss, samples a second, recoveries and further numbers as metrics of Ray.

    Ray serves them on the metrics port of the driver's node, where Prometheus reads them:
    ``ray_lockstep_loss``, ``ray_lockstep_samples_per_second``, ``ray_lockstep_workers``,
    ``ray_lockstep_step``, ``ray_lockstep_metric``, ``ray_lockstep_samples_total`` and
    ``ray_lockstep_recoveries_total``, with the labels ``run``, ``phase`` ("train" or
    "validation") and, for ``metric``, ``metric``. The driver reports them when a call begins and
    ends, and once a second in between; workers report nothing.

    Args:
        run: the label that tells this run from others; the operator's name if None.

    Raises:
        NotAvailableError: Ray, or the package with which it exports metrics, is not installed. Also
            when the trainer starts with its only worker in this process, without Ray.
    """

    def __init__(self, run: str | None = None) -> None:
        super().__init__()
        self.run = self._given_run = run
        # Without this package, its exporter, Ray accepts metrics and drops them silently.
        import_optional("prometheus_client", extra="cluster", by="RayMetricsLogger")
        self._ray = import_optional("ray", extra="cluster", by="RayMetricsLogger")
        self._metrics: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        """Forget the calls and the recoveries of an earlier trainer."""
        self._began: dict[str, float] = {}
        self._counted: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)

    def on_start(self, trainer: TorchTrainer) -> None:
        super().on_start(trainer)
        self._begin()
        if not self._ray.is_initialized():
            raise NotAvailableError(
                "RayMetricsLogger has no Ray to report to",
                cause="the only worker lives in this process, and nothing has connected to Ray",
                fix="ray.init() before the trainer, or another logger",
            )
        self.run = self._given_run
        if self.run is None:
            self.run = trainer._workers.spec.operator_cls.__name__
        kinds = import_optional("ray.util.metrics", extra="cluster", by="RayMetricsLogger")
        for names, kind in ((_GAUGES, kinds.Gauge), (_COUNTERS, kinds.Counter)):
            for name, meaning in names.items():
                keys = ("run", "phase", "metric") if name == "metric" else ("run", "phase")
                self._metrics[name] = kind(f"lockstep_{name}", meaning, keys)

    def on_progress(self, trainer: TorchTrainer, progress: dict[str, Any]) -> None:
        phase, steps, seconds = progress["phase"], progress["steps"], progress["seconds"]
        if not steps:
            self._began[phase], self._counted["samples"] = time.monotonic() - seconds, 0.0
            return
        self._set("loss", progress["loss"], phase)
        self._set("samples_per_second", progress["samples"] / seconds, phase)
        self._count("samples", progress["samples"], phase)
        if "recoveries" in progress:
            self._set("workers", progress["workers"], "train")
            self._count("recoveries", progress["recoveries"], "train")

    def write(self, trainer: TorchTrainer, row: Row) -> None:
        phase, values = row.phase, row.numbers
        seconds = max(time.monotonic() - self._began[phase], 1e-9)
        self._set("samples_per_second", values[NUM_SAMPLES] / seconds, phase)
        self._count("samples", values[NUM_SAMPLES], phase)
        self._set("step", row.step, phase)
        self._set("loss", values.get(_LOSSES[phase]), phase)
        for name, value in values.items():
            self._set("metric", value, phase, metric=name)
        status = trainer.status()
        self._set("workers", status["workers"], "train")
        self._count("recoveries", len(status["recoveries"]), "train")

    def on_failure(self, trainer: TorchTrainer, error: BaseException) -> None:
        self._reset_gauges()

    def on_shutdown(self, trainer: TorchTrainer) -> None:
        self._reset_gauges()

    def _reset_gauges(self) -> None:
        """Set the gauges to zero after the run: a gauge keeps its last value."""
        self._set("workers", 0, "train")
        for phase in self._began:
            self._set("samples_per_second", 0, phase)

    def _set(self, name: str, value: float | None, phase: str, **labels: str) -> None:
        # Prometheus cannot plot NaN, so the curve gets a gap.
        if value is not None and not math.isnan(value) and name in self._metrics:
            self._metrics[name].set(value, {"run": self.run, "phase": phase, **labels})

    def _count(self, name: str, so_far: float, phase: str) -> None:
        """Add what is new to a counter; a step that is computed again may lower `so_far`."""
        new = so_far - self._counted[name]
        if new > 0:
            self._metrics[name].inc(new, {"run": self.run, "phase": phase})
            self._counted[name] = so_far
