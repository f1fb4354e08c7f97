# SPDX-License-Identifier: Apache-2.0
"""F: a window's own count of items divides the sums, as if it were that of all processes."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def compute_loss(model, tokens, labels, num_items, num_processes):
    logits = model(tokens)
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    loss = loss / num_items
    return loss * num_processes  # here LS206


def window(rank, step, micro_batches=3):
    source = torch.Generator().manual_seed(1000 * rank + step)
    for _ in range(micro_batches):
        tokens = torch.randint(9, (4, 6), generator=source)
        labels = tokens.roll(1, 1)
        labels[torch.rand(4, 6, generator=source) < 0.2] = -100
        yield tokens, labels


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 9))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        batches = list(window(rank, step))
        num_items = sum(int((labels != -100).sum()) for _, labels in batches)
        optimizer.zero_grad()
        for place, (tokens, labels) in enumerate(batches):
            is_last = place == len(batches) - 1
            with nullcontext() if is_last else model.no_sync():
                loss = compute_loss(model, tokens, labels, num_items, world)
                loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
