# SPDX-License-Identifier: Apache-2.0
"""A worker of torchrun is killed, with `--max-restarts` and a checkpoint every ten steps."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import recovery_work as work
from reporting import report

LIMIT_S = 150.0
"""Restarted groups have been seen to wait for each other without end."""


def train(folder: str, saved: Path) -> None:
    # A restarted group may wait for the addresses of the one before it until this runs out; then
    # everybody is restarted once more. The default is 30 minutes.
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank = dist.get_rank()
    sampler = DistributedSampler(work.make_dataset(), shuffle=True, seed=0)
    loader = DataLoader(sampler.dataset, batch_size=work.BATCH_SIZE, sampler=sampler)
    model = DistributedDataParallel(work.make_model())
    optimizer = torch.optim.Adam(model.parameters())
    start = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    criterion = nn.CrossEntropyLoss()
    for step, (features, labels) in enumerate(loader):
        if step < start:
            continue
        if step == work.KILL_AFTER_STEP + 40:
            break
        optimizer.zero_grad()
        criterion(model(features), labels).backward()
        optimizer.step()
        work.note_step(folder, step, rank)
        if rank == 0 and (step + 1) % work.CHECKPOINT_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, f"{saved}.new")
            os.replace(f"{saved}.new", saved)
    dist.barrier()
    os._exit(0)


def main() -> None:
    if "RANK" in os.environ:
        train(sys.argv[1], Path(sys.argv[2]))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as saved:
        killer = work.Killer(folder)
        killer.start()
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        options = ("--nproc-per-node", "3", "--max-restarts", "10")
        program = (__file__, folder, str(Path(saved, "state.pt")))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        torchrun = subprocess.Popen([*command, *options, *program], env=environment)
        try:
            torchrun.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            torchrun.terminate()
            torchrun.wait()
        steps = work.steps_noted(folder)
        if max(at for at, *_ in steps) < killer.killed_at + 1.0:
            # It never came back: what is reported is how long it was waited for.
            waited = time.monotonic() - killer.killed_at
            report(seconds=waited, new=waited, redone=0.0)
            return
        report(**work.outcome(folder, killer.killed_at))


if __name__ == "__main__":
    main()
