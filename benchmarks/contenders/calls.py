# SPDX-License-Identifier: Apache-2.0
"""``calls.py WORKERS``: an epoch of one step, called 100 times."""

from __future__ import annotations

import statistics
import sys
import time

import workload
from classifier import Classifier
from lockstep import TorchTrainer
from reporting import report

NUM_CALLS = 100


def main() -> None:
    workers = int(sys.argv[1])
    # A global batch of the same size at every number of workers: the step itself stays the same.
    config = {"num_steps": 1, "batch_size": workload.NUM_WORKERS * workload.BATCH_SIZE // workers}
    begun = time.perf_counter()
    with TorchTrainer(
        training_operator_cls=Classifier, num_workers=workers, config=config, use_tqdm=False
    ) as trainer:
        started = time.perf_counter() - begun
        trainer.train()
        times = []
        for _ in range(NUM_CALLS):
            start = time.perf_counter()
            result = trainer.train()
            times.append(time.perf_counter() - start)
        if result["batch_count"] != 1:
            raise RuntimeError(f"an epoch of one step was wanted, not {result}")
    report(milliseconds=1000 * statistics.median(times), start=started)


if __name__ == "__main__":
    main()
