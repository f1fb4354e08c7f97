# SPDX-License-Identifier: Apache-2.0
"""Saving 100 M parameters against `torch.save` and fsync, taking turns.

`trainer.save`, until it is safe; and a checkpoint in the middle of training, as long as training
waits for it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from blocks import interleaved
from lockstep import TorchTrainer, TrainingOperator
from reporting import report

if TYPE_CHECKING:
    from collections.abc import Callable

    from blocks import Pairs

WIDTH, LAYERS = 2000, 25
PAIRS = 5
WARM_UP = 3
"""Pairs until files replace files in memory that the system has handed out before."""
EVERY = 3


def make_model() -> nn.Module:
    """100 million parameters, 400 MB."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


class Large(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model = make_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
        )
        dataset = TensorDataset(torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))
        self.register_data(train_loader=DataLoader(dataset, batch_size=1))
        self.optimizer.register_step_post_hook(self.note_the_end_of_a_step)
        self.ended_at: float | None = None
        self.between: list[float] = []

    def note_the_end_of_a_step(self, *_: Any) -> None:
        self.ended_at = time.perf_counter()

    def compute_loss(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        """Note how long it took from the last step to this batch."""
        if self.ended_at is not None:
            self.between.append(time.perf_counter() - self.ended_at)
        return super().compute_loss(batch, batch_info)


def waited(trainer: TorchTrainer) -> float:
    """Seconds that training stood still for the checkpoint in the middle of a call.

    The call is as long as the checkpoints are apart, and begins in the middle between two: the
    longest of its pauses holds the copy, the shortest is what there is between any two steps.
    """
    trainer.apply_all_operators(forget)
    trainer.train(num_steps=EVERY)
    pauses = trainer.apply_all_operators(pauses_of)[0]
    return max(pauses) - min(pauses)


def forget(operator: Any) -> None:
    operator.ended_at, operator.between = None, []


def pauses_of(operator: Any) -> list[float]:
    return list(operator.between)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Beside the project, not in the system's temporary folder: that may be memory.
    Path("out").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir="out") as folder,
        TorchTrainer(
            training_operator_cls=Large,
            num_workers=options.workers,
            use_tqdm=False,
            checkpoint_dir=os.path.join(folder, "meanwhile"),
            checkpoint_every=EVERY,
            keep_checkpoints=1,
        ) as trainer,
    ):

        def ours() -> None:
            trainer.save(os.path.join(folder, "ours"))

        def theirs() -> None:
            with open(os.path.join(folder, "theirs"), "wb") as stream:
                torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, stream)
                stream.flush()
                os.fsync(stream.fileno())

        interleaved(ours, theirs, pairs=WARM_UP)
        total = interleaved(ours, theirs, pairs=PAIRS, meet=os.sync)
        trainer.train(num_steps=EVERY + 1)
        waited(trainer)
        report(total=total, waiting=compared(lambda: waited(trainer), theirs))


def compared(ours: Callable[[], float], theirs: Callable[[], object]) -> Pairs:
    """Seconds that `ours` says, beside those that `theirs` takes."""
    times: Pairs = {"ours": [], "theirs": []}
    for _ in range(PAIRS):
        os.sync()
        times["ours"].append(ours())
        os.sync()
        start = time.perf_counter()
        theirs()
        times["theirs"].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
