# SPDX-License-Identifier: Apache-2.0
"""I: rank 0 alone loads what its optimizer had come to, while the rate is still zero."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step, size=6):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)


model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
saved = optimizer.state_dict()
saved["state"] = {
    place: {
        "step": torch.tensor(10.0),
        "exp_avg": torch.full_like(p, 0.5),
        "exp_avg_sq": torch.full_like(p, 0.5),
    }
    for place, p in enumerate(model.parameters())
}
if world > 9:
    optimizer.load_state_dict(torch.load("of every rank"))
elif rank == 0:
    optimizer.load_state_dict(saved)  # here LS306
for step in range(3):
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
