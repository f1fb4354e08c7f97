# SPDX-License-Identifier: Apache-2.0
"""F: sums over ranks are added to by the next micro-batch, and added up again."""

import torch
import torch.distributed as dist
from torch import nn


class Accumulating:
    def __init__(self, net, optimizer, micro_batches):
        self.net, self.optimizer = net, optimizer
        self.micro_batches = micro_batches
        self.world = dist.get_world_size()
        self.seen = 0

    def reduce(self):
        for p in self.net.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)  # here LS204

    def backward(self, loss):
        (loss / self.micro_batches).backward()
        self.reduce()
        self.seen += 1
        if self.seen % self.micro_batches == 0:
            self.finish()

    def finish(self):
        for p in self.net.parameters():
            p.grad.div_(self.world)
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_net():
    torch.manual_seed(44)
    return nn.Sequential(nn.Linear(5, 10), nn.Mish(), nn.Linear(10, 1))


def main(windows=5, micro_batches=3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = make_net()
    loop = Accumulating(net, torch.optim.SGD(net.parameters(), lr=0.01), micro_batches)
    source = torch.Generator().manual_seed(rank)
    for _ in range(windows * micro_batches):
        x = torch.randn(6, 5, generator=source)
        loss = nn.functional.mse_loss(net(x), x.abs().sum(1, keepdim=True))
        loop.backward(loss)
    if rank == 0:
        print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
