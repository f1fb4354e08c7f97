# SPDX-License-Identifier: Apache-2.0
"""Memory of one worker at rest and after some steps, and of a Ray actor that does nothing."""

from __future__ import annotations

import statistics

import ray
from footprint import private_mb
from lockstep import TorchTrainer
from memory_torchrun import MODEL, NUM_STEPS
from model_operator import ModelOperator
from reporting import report

NUM_WORKERS = 2


class Idle:
    """An actor with the same modules as a hand-written loop, and no work."""

    def footprint(self) -> float:
        import torch

        import model_operator  # noqa: F401  what a bare rank of the other side has imported, too

        torch.set_num_threads(1)
        return private_mb()


def main() -> None:
    ray.init()
    idle = ray.remote(num_cpus=1)(Idle).remote()
    # Ray imports its serialisers with the first answer: they are its own part, too.
    ray.get(idle.footprint.remote())
    bare = ray.get(idle.footprint.remote())
    ray.kill(idle)
    with TorchTrainer(
        training_operator_cls=ModelOperator,
        num_workers=NUM_WORKERS,
        config={"model": MODEL, "num_samples": NUM_STEPS * NUM_WORKERS * 32},
        use_tqdm=False,
    ) as trainer:
        rest = statistics.mean(trainer.apply_all_workers(private_mb))
        trainer.train()
        trainer.train()
        training = statistics.mean(trainer.apply_all_workers(private_mb))
    report(bare=bare, rest=rest, training=training)


if __name__ == "__main__":
    main()
