# SPDX-License-Identifier: Apache-2.0
"""The base class of all loggers, which makes a row of each result of `train` and `validate`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.metrics.metric_values import as_number, read_numbers
from lockstep.trainer.argument_checks import require_count
from lockstep.trainer.callbacks import Callback

if TYPE_CHECKING:
    from lockstep.trainer import TorchTrainer


@dataclass(frozen=True)
class Row:
    """The result of one call, or the metrics of some of its steps.

    Attributes:
        phase: "train", "validation", or "step" for the metrics of single steps.
        step: optimizer steps (global batches) since the run began, earlier programs included.
        epoch: number of passes over the training data that have begun; None if this program has not
            trained yet.
        values: numbers and strings by name; nested ones as ``profile/mean_fwd_s``.
        time: seconds since 1970.
    """

    phase: str
    step: int
    epoch: int | None
    values: Mapping[str, float | str]
    time: float = field(default_factory=time.time)

    @property
    def numbers(self) -> dict[str, float]:
        return {name: each for name, each in self.values.items() if not isinstance(each, str)}


class Logger(Callback):
    """A callback that turns results into rows; a subclass overrides `write`.

    A row holds means over all workers, in which every sample counts once. A subclass that overrides
    `on_start` calls ``super().on_start(trainer)``, which forgets what an earlier trainer reported.

    Args:
        every: the number of optimizer steps (global batches) after which a call also gets a row
            with the phase "step": the means over all samples of these steps. None: no such rows.

    Raises:
        ConfigurationError: `every` is no positive number of steps.
    """

    def __init__(self, every: int | None = None) -> None:
        require_count("every", every, optional=True)
        self.every = every
        self._epoch: int | None = None

    def on_start(self, trainer: TorchTrainer) -> None:
        self._epoch = None

    def write(self, trainer: TorchTrainer, row: Row) -> None:
        """Write `row`, and flush it: the program may be killed at any time."""
        raise NotImplementedError

    def on_step(self, trainer: TorchTrainer, step: int, metrics: dict[str, Any]) -> None:
        self._epoch = metrics["epoch"]
        self._write_row(trainer, "step", step, metrics)

    def on_train_end(self, trainer: TorchTrainer, result: dict[str, Any]) -> None:
        self._epoch = result.get("epoch", self._epoch)
        self._write_row(trainer, "train", trainer.status()["step"], result)

    def on_validate_end(self, trainer: TorchTrainer, result: dict[str, Any]) -> None:
        self._write_row(trainer, "validation", trainer.status()["step"], result)

    def _write_row(
        self, trainer: TorchTrainer, phase: str, step: int, result: Mapping[str, Any]
    ) -> None:
        values = flatten(result)
        if phase != "validation":  # in which an "epoch" is a metric of the operator's own
            values.pop("epoch", None)
        self.write(trainer, Row(phase, step, self._epoch, values))


def flatten(mapping: Mapping[str, Any], before: str = "") -> dict[str, float | str]:
    """Flatten the numbers and strings of a nested mapping into names like ``outer/inner``."""
    flat: dict[str, float | str] = {}
    for key, value in mapping.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}/"))
        elif isinstance(value, str):
            flat[name] = value
        elif (number := as_number(value)) is not None:
            flat[name] = read_numbers([number])[0]
    return flat
