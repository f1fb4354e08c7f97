# SPDX-License-Identifier: Apache-2.0
"""What a call of `train()` costs beyond its steps.

The same number of steps, once in one call and once in a call each; what the second takes longer,
divided by the additional calls. Nothing inside the library is timed or changed for it.
"""

from __future__ import annotations

import statistics
import time

import workload
from classifier import Classifier
from lockstep import TorchTrainer
from reporting import report

NUM_CALLS = 50
REPEATS = 5


def main() -> None:
    # One epoch holds all of it: the end of an epoch has a cost of its own, measured elsewhere.
    num_steps = 1 + REPEATS * 2 * NUM_CALLS
    with TorchTrainer(
        training_operator_cls=Classifier,
        num_workers=workload.NUM_WORKERS,
        config={"num_steps": num_steps + 1},
        use_tqdm=False,
    ) as trainer:
        trainer.train(num_steps=1)
        costs = [_cost_of_a_call(trainer) for _ in range(REPEATS)]
    report(milliseconds=1000 * statistics.median(costs))


def _cost_of_a_call(trainer: TorchTrainer) -> float:
    start = time.perf_counter()
    trainer.train(num_steps=NUM_CALLS)
    middle = time.perf_counter()
    for _ in range(NUM_CALLS):
        trainer.train(num_steps=1)
    end = time.perf_counter()
    return ((end - middle) - (middle - start)) / (NUM_CALLS - 1)


if __name__ == "__main__":
    main()
