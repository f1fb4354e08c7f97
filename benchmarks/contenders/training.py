# SPDX-License-Identifier: Apache-2.0
"""An epoch of `TorchTrainer.train()` against one of a hand-written loop, in the same workers.

Ours is timed where the user waits for it, in the driver, with the call, the data and the metrics;
theirs inside the worker, from its first batch to its last loss.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from lockstep import TorchTrainer
from model_operator import ModelOperator, hand_epoch
from models import WORKLOADS
from reporting import report

if TYPE_CHECKING:
    from blocks import Pairs

EPOCH_STEPS = {"tiny": 500, "many": 70, "large": 20, "convnet": 55, "transformer": 45}
"""About a second each on two CPU cores."""


def _measure(name: str, num_workers: int, pairs: int) -> Pairs:
    steps = EPOCH_STEPS[name]
    num_samples = steps * num_workers * WORKLOADS[name].batch_size
    times: Pairs = {"ours": [], "theirs": []}
    with TorchTrainer(
        training_operator_cls=ModelOperator,
        num_workers=num_workers,
        config={"model": name, "num_samples": num_samples},
        use_tqdm=False,
    ) as trainer:
        by_hand = hand_epoch(name, num_samples)

        def ours() -> float:
            start = time.perf_counter()
            trainer.train()
            return time.perf_counter() - start

        def theirs() -> float:
            return max(trainer.apply_all_workers(by_hand))

        ours(), theirs()
        sides = (("ours", ours), ("theirs", theirs))
        for number in range(pairs):
            for side, run in sides if number % 2 == 0 else reversed(sides):
                times[side].append(1000 * run() / steps)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    models = options.models or list(WORKLOADS)
    report(**{name: _measure(name, options.workers, options.pairs) for name in models})


if __name__ == "__main__":
    main()
