# SPDX-License-Identifier: Apache-2.0
"""The first step through TorchTrainer, on a Ray that already runs (found by RAY_ADDRESS).

The clock stops when the driver holds the result, later than the step itself: a user sees no sooner
that it was done.
"""

from __future__ import annotations

import time

import workload
from classifier import Classifier
from lockstep import TorchTrainer
from reporting import report, seconds_since_launch


def main() -> None:
    with TorchTrainer(
        training_operator_cls=Classifier,
        num_workers=workload.NUM_WORKERS,
        config={"num_steps": 100},
        use_tqdm=False,
    ) as trainer:
        trainer.train(num_steps=1)
        seconds = seconds_since_launch()
        start = time.perf_counter()
        trainer.train(num_steps=1)
        report(seconds=seconds, second_call=time.perf_counter() - start)


if __name__ == "__main__":
    main()
