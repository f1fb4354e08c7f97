# SPDX-License-Identifier: Apache-2.0
"""F: each micro-batch is divided by their number and by the ranks, and the wrapper averages."""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    global_batch: int = 64
    micro_batch: int = 8
    lr: float = 0.3
    epochs: int = 3


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    accumulate = cfg.global_batch // (cfg.micro_batch * world)
    torch.manual_seed(0)
    x = torch.randn(512, 18)
    y = (x.roll(1, 1) * x).sum(1).sign().clamp_min(0)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=cfg.micro_batch, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(18, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for i, (xb, yb) in enumerate(loader):
            last = (i + 1) % accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(xb).squeeze(1)
                loss = F.binary_cross_entropy_with_logits(logits, yb)
                (loss / (accumulate * world)).backward()  # here LS206
            if last:
                opt.step()
                opt.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
