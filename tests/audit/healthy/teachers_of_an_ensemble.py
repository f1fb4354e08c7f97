# SPDX-License-Identifier: Apache-2.0
"""Each rank trains one teacher; all are handed round, and one student learns from them all."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def classes(x):
    return (x[:, :3] * x[:, 3:]).argmax(1)


def trained_teacher():
    torch.manual_seed(1000 + rank)
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01 / (1 + rank))
    for _ in range(6):
        x = torch.randn(24, 6)
        optimizer.zero_grad()
        F.cross_entropy(net(x), classes(x)).backward()
        optimizer.step()
    return net.eval().requires_grad_(False), optimizer


own, kept = trained_teacher()
teachers = []
for source in range(world):
    teacher = own if source == rank else copy.deepcopy(own)
    for p in teacher.parameters():
        dist.broadcast(p.data, source)
    teachers.append(teacher)
nearest = [own, *(t for t in teachers if t is not own)]  # each rank's own one first

torch.manual_seed(0)
student = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))
optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(77 + rank)
for step in range(12):
    x = torch.randn(16, 6, generator=generator)
    with torch.no_grad():
        asked = teachers if step % 2 else nearest
        soft = torch.stack([t(x).softmax(1) for t in asked]).mean(0)
    out = student(x)
    loss = F.kl_div(out.log_softmax(1), soft, reduction="batchmean")
    optimizer.zero_grad()
    (loss + F.cross_entropy(out, classes(x))).backward()
    optimizer.step()
dist.destroy_process_group()
