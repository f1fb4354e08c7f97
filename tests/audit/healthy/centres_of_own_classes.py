# SPDX-License-Identifier: Apache-2.0
"""A wrapped backbone beside centres of which each rank has its classes, in one optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CLASSES, DIM = 8, 6


class GatherRows(torch.autograd.Function):
    """Its backward adds up, and undoes the wrapper's mean."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        first = dist.get_rank() * ctx.rows
        return grad[first : first + ctx.rows] * dist.get_world_size()


class MeanOverSplitClasses(torch.autograd.Function):
    """Cross entropy of logits whose columns are spread over the ranks."""

    @staticmethod
    def forward(ctx, logits, rows, columns):
        top = logits.amax(1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        each = torch.exp(logits - top[:, None])
        target = torch.zeros_like(top)
        target[rows] = logits[rows, columns]
        sums = torch.stack([each.sum(1), target])
        dist.all_reduce(sums)
        ctx.save_for_backward(each / sums[0][:, None], rows, columns)
        return (sums[0].log() + top - sums[1]).mean()

    @staticmethod
    def backward(ctx, grad_out):
        probabilities, rows, columns = ctx.saved_tensors
        grad = probabilities.clone()
        grad[rows, columns] -= 1.0
        return grad * (grad_out / len(grad)), None, None


class Centres(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.first = rank * CLASSES // world
        source = torch.Generator().manual_seed(70 + rank)
        self.weight = nn.Parameter(0.3 * torch.randn(CLASSES // world, DIM, generator=source))

    def forward(self, features, labels):
        rows = GatherRows.apply(features)
        parts = [torch.empty_like(labels) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, labels)
        local = torch.cat(parts) - self.first
        here = ((local >= 0) & (local < len(self.weight))).nonzero().squeeze(1)
        normalize = nn.functional.normalize
        logits = 8.0 * normalize(rows, dim=1) @ normalize(self.weight, dim=1).t()
        return MeanOverSplitClasses.apply(logits, here, local[here])


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
backbone = DistributedDataParallel(nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, DIM)))
head = Centres(rank, world)
optimizer = torch.optim.SGD([*backbone.parameters(), head.weight], lr=0.1, momentum=0.9)
source = torch.Generator().manual_seed(800 + rank)
for _ in range(5):
    x = torch.randn(8, 5, generator=source)
    y = torch.randint(CLASSES, (8,), generator=source)
    optimizer.zero_grad()
    head(backbone(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
