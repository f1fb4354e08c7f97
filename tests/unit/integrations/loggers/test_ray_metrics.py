# SPDX-License-Identifier: Apache-2.0
"""What the logger of Ray's metrics counts of each trainer that it is given to."""

from types import SimpleNamespace

from tests.unit.integrations.loggers.test_loggers import Regression

from lockstep import TorchTrainer
from lockstep.integrations.loggers import RayMetricsLogger
from lockstep.keys import BATCH_SIZE


class Noted(RayMetricsLogger):
    """Notes what it would add to its counters; without Ray nobody serves them."""

    def __init__(self):
        super().__init__()
        self._ray = SimpleNamespace(is_initialized=lambda: True)
        self.added = []

    def on_start(self, trainer):
        super().on_start(trainer)
        self._metrics = {
            name: SimpleNamespace(
                inc=lambda value, labels, name=name: self.added.append((labels["run"], name, value))
            )
            for name in ("samples", "recoveries")
        }


class Another(Regression):
    pass


def test_each_trainer_is_counted_from_nothing():
    logger = Noted()
    for operator, recoveries in ((Regression, 3), (Another, 1)):
        with TorchTrainer(
            training_operator_cls=operator,
            config={"lr": 0.01, BATCH_SIZE: 10},
            callbacks=[logger],
        ) as trainer:
            progress = {"phase": "train", "seconds": 1.0, "loss": 2.0, "workers": 2}
            logger.on_progress(trainer, {**progress, "steps": 0, "samples": 0, "recoveries": 0})
            told = {**progress, "steps": 1, "samples": 20, "recoveries": recoveries}
            logger.on_progress(trainer, told)
    assert logger.added == [
        ("Regression", "samples", 20),
        ("Regression", "recoveries", 3),
        ("Another", "samples", 20),
        ("Another", "recoveries", 1),
    ]
