# SPDX-License-Identifier: Apache-2.0
"""Epochs of a trainer that keeps a log of its run, against epochs of one that keeps none."""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING, Any

from blocks import interleaved
from lockstep import TorchTrainer
from model_operator import ModelOperator
from models import WORKLOADS
from reporting import report
from training import EPOCH_STEPS

if TYPE_CHECKING:
    from blocks import Pairs


def _trainer(name: str, **arguments: Any) -> TorchTrainer:
    num_samples = EPOCH_STEPS[name] * WORKLOADS[name].batch_size
    return TorchTrainer(
        training_operator_cls=ModelOperator,
        config={"model": name, "num_samples": num_samples},
        num_cpus_per_worker=1,
        use_tqdm=False,
        **arguments,
    )


def _measure(name: str, pairs: int) -> Pairs:
    with (
        tempfile.TemporaryDirectory() as folder,
        _trainer(name, checkpoint_dir=folder) as logged,
        _trainer(name) as plain,
    ):
        logged.train(), plain.train()
        times = interleaved(logged.train, plain.train, pairs=pairs)
    steps = EPOCH_STEPS[name]
    return {side: [1000 * each / steps for each in values] for side, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    report(**{name: _measure(name, options.pairs) for name in options.models})


if __name__ == "__main__":
    main()
