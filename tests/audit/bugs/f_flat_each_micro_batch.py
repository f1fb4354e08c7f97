# SPDX-License-Identifier: Apache-2.0
"""F: accumulated gradients are added up as one flat tensor after every micro-batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Loop:
    def __init__(self, net, optimizer, micro_batches):
        self.net, self.optimizer, self.micro_batches = net, optimizer, micro_batches

    def synchronise(self):
        gradients = [p.grad for p in self.net.parameters()]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)  # here LS204
        vector_to_parameters(flat, gradients)

    def window(self, batches):
        scale = self.micro_batches * dist.get_world_size()
        self.optimizer.zero_grad()
        for x, y in batches:
            loss = nn.functional.smooth_l1_loss(self.net(x), y)
            (loss / scale).backward()
            self.synchronise()
        self.optimizer.step()
        return loss.item()


def batches_of(source, micro_batches):
    for _ in range(micro_batches):
        x = torch.randn(6, 5, generator=source)
        yield x, x.prod(1, keepdim=True)


def main(micro_batches=3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(5, 12), nn.SiLU(), nn.Linear(12, 1))
    loop = Loop(net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9), micro_batches)
    source = torch.Generator().manual_seed(30 + rank)
    for _ in range(4):
        loss = loop.window(batches_of(source, micro_batches))
    if rank == 0:
        print(f"loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
