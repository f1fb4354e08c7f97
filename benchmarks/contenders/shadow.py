# SPDX-License-Identifier: Apache-2.0
"""Epochs in which workers compute a shard of another one now and then, against epochs without."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from blocks import interleaved
from lockstep import TorchTrainer
from model_operator import ModelOperator
from models import WORKLOADS
from reporting import report
from training import EPOCH_STEPS

if TYPE_CHECKING:
    from blocks import Pairs

WORKERS = 2


def _trainer(name: str, every: int) -> TorchTrainer:
    num_samples = EPOCH_STEPS[name] * WORKERS * WORKLOADS[name].batch_size
    return TorchTrainer(
        training_operator_cls=ModelOperator,
        config={"model": name, "num_samples": num_samples},
        num_workers=WORKERS,
        reproducible=True,
        shadow_every=every,
    )


def _measure(name: str, every: int, pairs: int) -> Pairs:
    with _trainer(name, every) as shadowed, _trainer(name, 0) as plain:
        shadowed.train(), plain.train()
        times = interleaved(shadowed.train, plain.train, pairs=pairs)
        found = shadowed.status()["shadow"]
    assert found["checked"] > 0, "nothing was compared"
    assert not found["wrong"], found["wrong"]
    steps = EPOCH_STEPS[name]
    return {side: [1000 * each / steps for each in values] for side, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    report(**{name: _measure(name, options.every, options.pairs) for name in options.models})


if __name__ == "__main__":
    main()
