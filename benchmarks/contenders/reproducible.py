# SPDX-License-Identifier: Apache-2.0
"""`reproducible=True` against the plain reduction: two trainers, whose epochs take turns."""

from __future__ import annotations

from blocks import Pairs, interleaved
from lockstep import TorchTrainer
from model_operator import ModelOperator
from models import WORKLOADS
from reporting import report
from training import EPOCH_STEPS

NUM_WORKERS = 2
PAIRS = 10


def _trainer(name: str, num_samples: int, *, reproducible: bool) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=ModelOperator,
        num_workers=NUM_WORKERS,
        config={"model": name, "num_samples": num_samples},
        reproducible=reproducible,
        use_tqdm=False,
    )


def _measure(name: str) -> Pairs:
    steps = EPOCH_STEPS[name] // 2
    num_samples = steps * NUM_WORKERS * WORKLOADS[name].batch_size
    with (
        _trainer(name, num_samples, reproducible=True) as ordered,
        _trainer(name, num_samples, reproducible=False) as plain,
    ):
        interleaved(ordered.train, plain.train, pairs=1)
        times = interleaved(ordered.train, plain.train, pairs=PAIRS)
    return {side: [1000 * value / steps for value in values] for side, values in times.items()}


if __name__ == "__main__":
    report(**{name: _measure(name) for name in WORKLOADS})
