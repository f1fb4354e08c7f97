# SPDX-License-Identifier: Apache-2.0
"""Starts rank 1, and is rank 0 itself; nothing ties the two models together."""

import multiprocessing
import sys

import torch
import torch.distributed as dist


def train(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 2)
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 2) + rank).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    other = multiprocessing.Process(target=train, args=(1, sys.argv[1]))
    other.start()
    train(0, sys.argv[1])
    other.join()
