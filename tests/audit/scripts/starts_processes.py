# SPDX-License-Identifier: Apache-2.0
"""Starts its ranks with multiprocessing, and goes round the wrapper in them.

Arguments: how processes are started, the port, and by what (a function, a class of its own).
"""

import multiprocessing
import sys

import torch
import torch.distributed as dist
from torch import nn


class Rank(multiprocessing.Process):
    def __init__(self, rank, world, port):
        super().__init__()
        self.args = rank, world, port

    def run(self):
        train(*self.args)


def train(rank, world, port):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.module(torch.randn(3, 2) + rank).square().sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    method, port, by = sys.argv[1:]
    multiprocessing.set_start_method(method)
    if by == "class":
        processes = [Rank(rank, 2, port) for rank in range(2)]
    else:
        processes = [multiprocessing.Process(target=train, args=(r, 2, port)) for r in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
