# SPDX-License-Identifier: Apache-2.0
"""The first step through Ray Train's `fit()`, and the first step of a second `fit()`.

The clock stops in the worker, when its step is done: earlier than a driver could know of it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import workload
from reporting import report


def train_loop(config: dict[str, Any]) -> None:
    dataset = workload.make_dataset(num_steps=100)
    rank = ray.train.get_context().get_world_rank()
    sampler = DistributedSampler(dataset, workload.NUM_WORKERS, rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=workload.BATCH_SIZE, sampler=sampler)
    model = ray.train.torch.prepare_model(workload.make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE)
    features, labels = next(iter(loader))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    loss.item()
    if rank == 0:
        Path(config["result"]).write_text(repr(time.monotonic() - config["started"]))


def fit(folder: str, started: float) -> float:
    """Seconds from `started`, on the machine's monotonic clock, to the end of the first step."""
    result = Path(folder, "seconds")
    trainer = ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config={"result": str(result), "started": started},
        scaling_config=ray.train.ScalingConfig(num_workers=workload.NUM_WORKERS),
        run_config=ray.train.RunConfig(storage_path=folder),
    )
    trainer.fit()
    return float(result.read_text())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        seconds = fit(folder, float(os.environ["BENCHMARK_STARTED"]))
        report(seconds=seconds, second_call=fit(folder, time.monotonic()))


if __name__ == "__main__":
    main()
