# SPDX-License-Identifier: Apache-2.0
"""Each rank forks a process that computes something, and trains nothing, beside its training."""

import multiprocessing

import torch
import torch.distributed as dist


def measure(weights, answers):
    answers.put(torch.nn.Linear(4, 1)(torch.ones(2, 4)).sum().item() + sum(weights))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.Generator().manual_seed(dist.get_rank())
context = multiprocessing.get_context("fork")
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=source)).square().mean().backward()
    optimizer.step()
    if step == 1:
        answers = context.Queue()
        weights = model.module.weight.flatten().tolist()
        beside = context.Process(target=measure, args=(weights, answers))
        beside.start()
        answers.get()
        beside.join()
dist.destroy_process_group()
