# SPDX-License-Identifier: Apache-2.0
"""What a step of `TorchTrainer.train()` pays for recovery while nothing happens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import kept
from lockstep import TorchTrainer
from model_operator import ModelOperator
from models import WORKLOADS
from reporting import report
from training import EPOCH_STEPS

if TYPE_CHECKING:
    from blocks import Pairs

MODELS = ("large", "convnet")
NUM_WORKERS, EPOCHS = 2, 5


def _measure(name: str) -> Pairs:
    steps = EPOCH_STEPS[name]
    times: Pairs = {"ours": [], "theirs": []}
    with TorchTrainer(
        training_operator_cls=ModelOperator,
        num_workers=NUM_WORKERS,
        config={
            "model": name,
            "num_samples": steps * NUM_WORKERS * WORKLOADS[name].batch_size,
        },
        use_tqdm=False,
    ) as trainer:
        trainer.train()
        trainer.apply_all_workers(kept.watch)
        for _ in range(EPOCHS):
            start = time.perf_counter()
            trainer.train()
            times["theirs"].append(1000 * (time.perf_counter() - start) / steps)
            times["ours"].append(1000 * max(trainer.apply_all_workers(kept.spent)) / steps)
    return times


if __name__ == "__main__":
    report(**{name: _measure(name) for name in MODELS})
