# SPDX-License-Identifier: Apache-2.0
"""Gradients are added up, and the learning rate is divided by the ranks: SGD's mean."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-lr", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=6)
    return parser.parse_args()


def add_up(module):
    pending = [dist.all_reduce(p.grad, async_op=True) for p in module.parameters()]
    for work in pending:
        work.wait()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=args.base_lr / world)
    gen = torch.Generator().manual_seed(28 + rank)
    for _ in range(args.steps):
        x = torch.randn(8, 4, generator=gen)
        y = x.square().sum(1, keepdim=True)
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(net(x), y).backward()
        add_up(net)
        optimizer.step()
    dist.destroy_process_group()


main()
