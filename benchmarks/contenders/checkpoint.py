# SPDX-License-Identifier: Apache-2.0
"""Saving 100 M parameters: `trainer.save` against `torch.save` and fsync, taking turns."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from blocks import interleaved
from lockstep import TorchTrainer, TrainingOperator
from reporting import report

WIDTH, LAYERS = 2000, 25
PAIRS = 4


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
            training_operator_cls=Large, num_workers=options.workers, use_tqdm=False
        ) as trainer,
    ):

        def ours() -> None:
            trainer.save(os.path.join(folder, "ours"))

        def theirs() -> None:
            with open(os.path.join(folder, "theirs"), "wb") as stream:
                torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, stream)
                stream.flush()
                os.fsync(stream.fileno())

        interleaved(ours, theirs, pairs=1)
        report(total=interleaved(ours, theirs, pairs=PAIRS, meet=os.sync))


if __name__ == "__main__":
    main()
