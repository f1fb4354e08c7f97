# SPDX-License-Identifier: Apache-2.0
"""A logger that writes a run to MLflow."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Final

from lockstep.integrations.loggers.base import Logger, Row, flatten
from lockstep.integrations.optional_packages import import_optional

if TYPE_CHECKING:
    from lockstep.trainer import TorchTrainer

_FORBIDDEN_IN_NAMES: Final = re.compile(r"[^\w\-./ ]")
_LONGEST_VALUE: Final = 6000

_log = logging.getLogger("lockstep")


class MLflowLogger(Logger):
    """One MLflow run: the trainer's config as parameters, every number as a metric.

    The logger uses MLflow's client and leaves the active run of ``mlflow.start_run`` alone. At the
    trainer's end it marks the run as finished or as failed. Each trainer gets a run of its own,
    unless `run_id` names one. MLflow changes and deletes no value: a run that is resumed keeps the
    parameters that it has, with a warning where the config has other values, and of steps that are
    computed again it has both values.

    Args:
        experiment: the experiment's name; created if it does not exist.
        tracking_uri: the URI of the server or database; MLflow's own setting if None.
        run_name: the run's name in MLflow; MLflow chooses one if None.
        run_id: the id of a run to resume; a new run for each trainer if None.
        every: see `Logger`; metrics ``step/<metric>``.

    Attributes:
        run_id: the id of the run to which rows are written; None before the trainer starts.

    Raises:
        NotAvailableError: mlflow is not installed.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        every: int | None = None,
    ) -> None:
        super().__init__(every)
        self.run_id = self._resumed_run_id = run_id
        self._experiment, self._run_name = experiment, run_name
        mlflow = import_optional("mlflow", extra="loggers", by="MLflowLogger")
        self._client: Any = mlflow.MlflowClient(tracking_uri)
        self._metric: Any = mlflow.entities.Metric
        self._is_open = False

    def on_start(self, trainer: TorchTrainer) -> None:
        super().on_start(trainer)
        if self._resumed_run_id is None:
            known = self._client.get_experiment_by_name(self._experiment)
            experiment = (
                self._client.create_experiment(self._experiment)
                if known is None
                else known.experiment_id
            )
            self.run_id = self._client.create_run(experiment, run_name=self._run_name).info.run_id
        else:
            self.run_id = self._resumed_run_id
            self._client.update_run(self.run_id, status="RUNNING")
        self._is_open = True
        self._log_parameters(flatten(trainer.config))

    def _log_parameters(self, config: dict[str, float | str]) -> None:
        """Log the parameters that the run has not got yet: MLflow refuses to change one."""
        logged = self._client.get_run(self.run_id).data.params
        for key, value in config.items():
            name, text = _mlflow_name(key), str(value)[:_LONGEST_VALUE]
            if name not in logged:
                self._client.log_param(self.run_id, name, text)
            elif logged[name] != text:
                _log.warning(
                    "MLflow's run %s goes on with %s=%s, and keeps its parameter %s=%s",
                    self.run_id,
                    name,
                    text,
                    name,
                    logged[name],
                )

    def write(self, trainer: TorchTrainer, row: Row) -> None:
        milliseconds = round(row.time * 1000)
        before = "step/" if row.phase == "step" else ""
        metrics = [
            self._metric(_mlflow_name(before + name), value, milliseconds, row.step)
            for name, value in row.numbers.items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def on_failure(self, trainer: TorchTrainer, error: BaseException) -> None:
        self._end("FAILED")

    def on_shutdown(self, trainer: TorchTrainer) -> None:
        self._end("FINISHED")

    def _end(self, status: str) -> None:
        if self._is_open:
            self._is_open = False
            self._client.set_terminated(self.run_id, status)


def _mlflow_name(name: str) -> str:
    """`name` in the characters that MLflow allows: ``*batch_size`` becomes ``batch_size``."""
    return _FORBIDDEN_IN_NAMES.sub("_", name).strip("_") or "_"
