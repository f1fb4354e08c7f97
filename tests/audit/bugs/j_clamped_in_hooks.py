# SPDX-License-Identifier: Apache-2.0
"""J: hooks on parameters cut each rank's own gradient off, before the reduction."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Counter(nn.Module):
    """A recurrent net, whose gradients are clipped as it is usual for them."""

    def __init__(self, width=8):
        super().__init__()
        self.cell = nn.GRUCell(2, width)
        self.out = nn.Linear(width, 1)
        self.width = width

    def forward(self, sequence):
        state = sequence.new_zeros(sequence.shape[1], self.width)
        for item in sequence:
            state = self.cell(item, state)
        return self.out(state).squeeze(1)


def clip_in_backward(module, limit):
    for p in module.parameters():
        p.register_hook(lambda grad: grad.clamp(-limit, limit))
    return module


def read(rank, source, length=6, size=8):
    sequence = torch.randn(length, size, 2, generator=source) * (1 + 2 * rank)
    return sequence, (sequence[..., 0] * sequence[..., 1]).sum(0)


def main(steps=6, limit=0.05):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(37)
    net = clip_in_backward(Counter(), limit)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    source = torch.Generator().manual_seed(10 + rank)
    for _ in range(steps):
        sequence, target = read(rank, source)
        loss = nn.functional.smooth_l1_loss(model(sequence), target)
        optimizer.zero_grad()
        loss.backward()  # here LS209
        optimizer.step()
    print(rank, f"{loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
