# SPDX-License-Identifier: Apache-2.0
"""A worker of TorchTrainer is killed: with a spare ready (argument "spare"), or without one.

With the argument "shards" the model is in units, and each worker alone has its rows. With "copies"
there are four workers: one copy of the model is sharded over two, another one over the others.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import recovery_work as work
from lockstep import TorchTrainer, TrainingOperator
from reporting import report


class Worker(TrainingOperator):
    def setup(self, config: Any) -> None:
        model = work.make_model()
        optimizer = torch.optim.Adam(model.parameters())
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            shard=[nn.Linear],
            dp_shard_size=config["dp_shard_size"],
        )
        self.register_data(
            train_loader=DataLoader(work.make_dataset(), work.BATCH_SIZE, shuffle=True)
        )
        optimizer.register_step_post_hook(
            lambda *_: work.note_step(config["folder"], self.global_step, self.world_rank)
        )


def main() -> None:
    spares, in_copies = int("spare" in sys.argv), "copies" in sys.argv
    with tempfile.TemporaryDirectory() as folder:
        with TorchTrainer(
            training_operator_cls=Worker,
            num_workers=4 if in_copies else 3,
            spare_workers=spares,
            # Ray has four processors here, and there are as many workers and a spare.
            resources_per_worker={"CPU": 0.8} if in_copies else None,
            sync="fsdp" if in_copies or "shards" in sys.argv else "replicate",
            config={"folder": folder, "dp_shard_size": 2 if in_copies else None},
        ) as trainer:
            killer = work.Killer(folder)
            killer.start()
            trainer.train(num_steps=work.KILL_AFTER_STEP + 40)
        report(**work.outcome(folder, killer.killed_at))


if __name__ == "__main__":
    main()
