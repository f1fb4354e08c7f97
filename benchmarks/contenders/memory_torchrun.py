# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank of a hand-written DDP loop: bare, at rest, after some steps."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from footprint import private_mb
from model_operator import HandLoop
from reporting import report

MODEL, NUM_STEPS = "large", 10


def main() -> None:
    torch.set_num_threads(1)
    bare = private_mb()
    dist.init_process_group("gloo")
    num_samples = NUM_STEPS * dist.get_world_size() * 32
    loop = HandLoop(MODEL, num_samples, torch.device("cpu"))
    rest = private_mb()
    loop.epoch()
    loop.epoch()
    training = private_mb()
    if dist.get_rank() == 0:
        report(bare=bare, rest=rest, training=training)
    dist.barrier()
    # torch 2.13 over gloo can abort while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
