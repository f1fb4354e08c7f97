# SPDX-License-Identifier: Apache-2.0
"""One training step under the watch of a trainer's worker, against the same step without.

Started by torchrun. The loop is DDP written by hand, so that every hook of the audit is in torch;
they are put in and taken out with each block of steps, as with each call of `TorchTrainer.train`.
The steps that are looked at in a run's beginning are behind it: what is timed is what goes on.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from blocks import Pairs, interleaved
from lockstep.audit.probe.hooking import hook_in
from lockstep.audit.probe.probe import Probe, TrainersRun
from lockstep.worker.run_audit import WATCHED_EVERY
from reporting import report

if TYPE_CHECKING:
    from collections.abc import Callable

BEGINNING = 256
"""Steps in which a watch looks more often."""


def _perceptron() -> nn.Module:
    layers = [module for _ in range(4) for module in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers)


def _encoder(width: int, layers: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    return make


MODELS = {
    "5 ms": (_perceptron, (128, 256), 64, 20),
    "50 ms": (_encoder(128, 4), (16, 32, 128), 16, 16),
    "25 M": (_encoder(512, 8), (4, 128, 512), 2, 8),
}
"""The model, its batch on one rank, the steps of one block, and how many pairs of blocks."""


def measure(name: str, mode: str) -> Pairs:
    make, shape, steps, pairs = MODELS[name]
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    features = torch.randn(shape, generator=torch.Generator().manual_seed(dist.get_rank()))
    run = TrainersRun(
        dist.get_rank(),
        dist.get_world_size(),
        synchronised=False,
        shares_out=False,
        first_step=BEGINNING,
        rarest=1 if mode == "full" else WATCHED_EVERY,
    )
    run.modules, run.optimizers = [model.module], [optimizer]
    probe = Probe(mode=mode, run=run)

    def step() -> None:
        optimizer.zero_grad()
        model(features).square().mean().backward()
        optimizer.step()

    def block() -> None:
        for _ in range(steps):
            step()

    def watched_block() -> None:
        hook_in(probe)
        block()
        probe.pause()

    watched_block()
    block()
    times = interleaved(watched_block, block, pairs=pairs, meet=dist.barrier)
    probe.stop()
    return {side: [1000 * t / steps for t in values] for side, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--mode", choices=("watch", "full"), default="watch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = {name: measure(name, options.mode) for name in options.models}
    if dist.get_rank() == 0:
        report(**measured)
    dist.barrier()
    # torch 2.13 over gloo can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
