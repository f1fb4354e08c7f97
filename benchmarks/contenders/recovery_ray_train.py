# SPDX-License-Identifier: Apache-2.0
"""A worker of Ray Train is killed, with `FailureConfig` and a checkpoint every ten steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import recovery_work as work
from reporting import report


def train_loop(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    sampler = DistributedSampler(work.make_dataset(), size, rank, shuffle=True, seed=0)
    loader = DataLoader(sampler.dataset, batch_size=work.BATCH_SIZE, sampler=sampler)
    model = ray.train.torch.prepare_model(work.make_model())
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.CrossEntropyLoss()
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    for step, (features, labels) in enumerate(loader):
        if step < start:
            continue
        if step == work.KILL_AFTER_STEP + 40:
            break
        optimizer.zero_grad()
        criterion(model(features), labels).backward()
        optimizer.step()
        work.note_step(config["folder"], step, rank)
        if (step + 1) % work.CHECKPOINT_EVERY == 0:
            _save(model, optimizer, step + 1, rank)


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    if rank != 0:
        ray.train.report({})
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, Path(folder, "state.pt"))
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as storage:
        killer = work.Killer(folder)
        killer.start()
        ray.train.torch.TorchTrainer(
            train_loop,
            train_loop_config={"folder": folder},
            scaling_config=ray.train.ScalingConfig(num_workers=3),
            run_config=ray.train.RunConfig(
                storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=3)
            ),
        ).fit()
        report(**work.outcome(folder, killer.killed_at))


if __name__ == "__main__":
    main()
