# SPDX-License-Identifier: Apache-2.0
"""Each rank has one table and looks rows up for all; what uses them is wrapped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS, DIM, BATCH = 20, 4, 8


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty(grad.shape)
        dist.all_to_all_single(out, grad.contiguous())
        return out


class Interaction(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.bottom = nn.Linear(3, DIM)
        self.top = nn.Sequential(nn.Linear(DIM * (tables + 1), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, looked_up):
        return self.top(torch.cat([self.bottom(dense), *looked_up], dim=1)).squeeze(1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Interaction(world))
torch.manual_seed(50 + rank)
table = nn.Embedding(ROWS, DIM)  # the table of feature number `rank`
step_dense = torch.optim.Adam(model.parameters(), lr=5e-3)
step_table = torch.optim.Adagrad(table.parameters(), lr=0.05)
clicks = torch.Generator().manual_seed(60 + rank)
for _ in range(6):
    dense = torch.randn(BATCH, 3, generator=clicks)
    sparse = torch.randint(ROWS, (world, BATCH), generator=clicks)  # one row per feature
    label = ((sparse.sum(0) % 2) == 0).float()
    wanted = torch.empty_like(sparse)
    dist.all_to_all_single(wanted, sparse)  # row r: what rank r wants of my table
    looked_up = AllToAll.apply(table(wanted).contiguous())  # (features, batch, dim)
    step_dense.zero_grad()
    step_table.zero_grad()
    score = model(dense, list(looked_up.unbind(0)))
    nn.functional.binary_cross_entropy_with_logits(score, label).backward()
    table.weight.grad.div_(world)
    step_dense.step()
    step_table.step()
dist.destroy_process_group()
