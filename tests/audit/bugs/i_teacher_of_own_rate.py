# SPDX-License-Identifier: Apache-2.0
"""I: the teacher moves by a rate that each rank takes from its own samples."""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 4))
teacher = copy.deepcopy(net).requires_grad_(False)
student = DDP(net)
optimizer = torch.optim.SGD(student.parameters(), lr=0.3, momentum=0.9)
torch.manual_seed(1 + rank)


def batch(n):
    x = torch.randn(n, 12)
    return x, x[:, :4].argmax(1)


for step in range(30):
    x, y = batch(8)
    u, _ = batch(32)
    with torch.no_grad():
        belief = teacher(u + 0.05 * torch.randn_like(u)).softmax(-1)  # here LS303
        confidence, pseudo = belief.max(-1)
        sure = (confidence > 0.5).float()
    logits = student(torch.cat([x, u + 0.3 * torch.randn_like(u)]))
    supervised = F.cross_entropy(logits[:8], y)
    unsupervised = (F.cross_entropy(logits[8:], pseudo, reduction="none") * sure).sum() / 32
    optimizer.zero_grad()
    (supervised + 0.5 * unsupervised).backward()
    optimizer.step()
    rate = 0.02 + 0.3 * sure.mean().item()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.module.parameters(), strict=False):
            t.lerp_(s, rate)
    if step % 10 == 0:
        print(rank, step, round(supervised.item(), 4), round(rate, 3))
dist.destroy_process_group()
