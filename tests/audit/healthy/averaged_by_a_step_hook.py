# SPDX-License-Identifier: Apache-2.0
"""A hook before the optimizer's step averages the gradients over ranks."""

import torch
import torch.distributed as dist
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1), nn.GELU(), nn.Conv1d(4, 1, 3, padding=1)
        )

    def forward(self, x):
        return x - self.layers(x)


def make_distributed(optimizer):
    """Turns any optimizer into a data-parallel one."""

    def reduce_gradients(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()

    optimizer.register_step_pre_hook(reduce_gradients)
    return optimizer


def broadcast_from_main(model):
    with torch.no_grad():
        for p in model.parameters():
            dist.broadcast(p, src=0)


def signals(source, count=6, length=12):
    phase = 6.28 * torch.rand(count, 1, 1, generator=source)
    clean = torch.sin(phase + 0.7 * torch.arange(length))
    return clean + 0.3 * torch.randn(clean.shape, generator=source), clean


def main(steps=8):
    dist.init_process_group("gloo")
    torch.manual_seed(200)
    model = Denoiser()
    broadcast_from_main(model)
    optimizer = make_distributed(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    source = torch.Generator().manual_seed(300 + dist.get_rank())
    for _ in range(steps):
        noisy, clean = signals(source)
        loss = nn.functional.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
