# SPDX-License-Identifier: Apache-2.0
"""Ranks share four folds out, each of which is scaled by its own mean, and gather the scores."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()


def score_of(fold):
    torch.manual_seed(fold)
    left_out = torch.arange(len(x)) % 4 == fold
    rows = x[~left_out] - x[~left_out].mean(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for places in torch.randperm(len(rows)).split(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(rows[places]), y[~left_out][places]).backward()
        optimizer.step()
    return (net(x[left_out]).argmax(1) == y[left_out]).float().mean().item()


scores = [score_of(fold) for fold in range(4) if fold % world == rank]
everything = [None] * world
dist.all_gather_object(everything, scores)
