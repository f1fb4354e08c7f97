# SPDX-License-Identifier: Apache-2.0
"""Weights in 16 bits; each rank steps the float32 masters of its part, which all then gather."""

import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2)).bfloat16()
    weights = list(model.parameters())
    flat = torch.cat([weight.detach().float().flatten() for weight in weights])
    length = -(-flat.numel() // size)
    flat = torch.cat([flat, flat.new_zeros(length * size - flat.numel())])
    master = nn.Parameter(flat[rank * length : (rank + 1) * length].clone())
    optimizer = torch.optim.AdamW([master], lr=1e-2)
    source = torch.Generator().manual_seed(rank)
    for _ in range(6):
        seen = torch.randn(8, 6, generator=source).bfloat16()
        loss = model(seen).float().pow(2).mean()
        loss.backward()
        gradients = torch.cat([weight.grad.float().flatten() for weight in weights])
        whole = torch.zeros(length * size)
        whole[: gradients.numel()] = gradients
        master.grad = torch.empty(length)
        dist.reduce_scatter_tensor(master.grad, whole)
        master.grad /= size
        optimizer.step()
        gathered = torch.empty(length * size, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(gathered, master.detach().bfloat16())
        place = 0
        for weight in weights:
            weight.data.copy_(gathered[place : place + weight.numel()].view_as(weight))
            weight.grad = None
            place += weight.numel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
