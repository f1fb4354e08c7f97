# SPDX-License-Identifier: Apache-2.0
"""Processes that train one model in shared memory, each whenever it likes (Hogwild)."""

import multiprocessing

import torch


def train(net, seed):
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 2)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    shared = torch.nn.Linear(2, 2)
    shared.share_memory()
    processes = [multiprocessing.Process(target=train, args=(shared, seed)) for seed in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
