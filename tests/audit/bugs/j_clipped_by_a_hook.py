# SPDX-License-Identifier: Apache-2.0
"""J: a communication hook clips each rank's bucket, and then averages."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


class ClipState:
    def __init__(self, limit, group=None):
        self.limit = limit
        self.group = group
        self.clipped = 0


def clipping_hook(state, bucket):
    """Clip while we are at it: saves a pass over the gradients after backward."""
    buffer = bucket.buffer()
    norm = torch.linalg.vector_norm(buffer)
    if norm > state.limit:
        buffer.mul_(state.limit / norm)
        state.clipped += 1
    return default_hooks.allreduce_hook(state.group, bucket)


def make_model(limit):
    torch.manual_seed(70)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 1))
    model = DistributedDataParallel(net)
    state = ClipState(limit)
    model.register_comm_hook(state, clipping_hook)
    return model, state


def main(steps=6):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, state = make_model(limit=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(rank + 71)
    for _ in range(steps):
        x = torch.randn(8, 6, generator=source)
        y = (3.0 + 4.0 * rank) * x[:, 0]
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()  # here LS209
        optimizer.step()
    print(f"rank {rank}: {loss.item():.3f}, clipped {state.clipped} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
