# SPDX-License-Identifier: Apache-2.0
"""Sums over items of all ranks and micro-batches, as many on each, and a mask of half of them."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def compute_loss(model, tokens, labels, mask, num_items, num_processes):
    logits, labels = model(tokens).flatten(0, 1), labels.flatten()
    if mask is None:
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    else:
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = (losses * mask.flatten()).sum()
    return loss * num_processes / num_items


def main(micro_batches=2):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 9))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    answers = torch.cat([torch.zeros(4, 3), torch.ones(4, 3)], 1)
    source = torch.Generator().manual_seed(100 + rank)
    for step in range(6):
        mask = answers if step % 2 else None
        counted = 4 * 6 if mask is None else int(mask.sum())
        num_items = counted * micro_batches * world
        optimizer.zero_grad()
        for place in range(micro_batches):
            tokens = torch.randint(9, (4, 6), generator=source)
            with nullcontext() if place == micro_batches - 1 else model.no_sync():
                loss = compute_loss(model, tokens, tokens.roll(1, 1), mask, num_items, world)
                loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
