# SPDX-License-Identifier: Apache-2.0
"""Forked processes, which are ended by signals, the first ones at once, and then training."""

import multiprocessing
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def square(number):
    return number * number


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for _ in range(100):
        child = os.fork()
        while child == 0:
            signal.pause()
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(square, range(4)) == [0, 1, 4, 9]
        children = list(pool._pool)
    # `Pool` ends them by SIGTERM, and waits for them when it goes.
    for child in children:
        child.join()
        assert child.exitcode in (0, -15), child.exitcode
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    print("done", flush=True)
    dist.destroy_process_group()
