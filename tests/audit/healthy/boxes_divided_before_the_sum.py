# SPDX-License-Identifier: Apache-2.0
"""One of two losses is divided by a count that each rank divides before it is summed."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 12)
        self.classes, self.boxes = nn.Linear(12, 3), nn.Linear(12, 4)

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return self.classes(hidden), self.boxes(hidden)


def losses(classes, boxes, labels, wanted):
    found = labels > 0
    count = found.sum() / dist.get_world_size()
    dist.all_reduce(count)
    count = count.clamp(min=1).item()
    box = F.l1_loss(boxes[found], wanted[found], reduction="sum") / count
    return {"class": F.cross_entropy(classes, labels), "box": box}


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Detector())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
draw = torch.Generator().manual_seed(3 + dist.get_rank())
WEIGHTS = {"class": 1.0, "box": 5.0}
for _ in range(8):
    x = torch.randn(12, 6, generator=draw)
    labels = torch.randint(3, (12,), generator=draw)
    parts = losses(*model(x), labels, torch.rand(12, 4, generator=draw))
    optimizer.zero_grad()
    sum(WEIGHTS[name] * part for name, part in parts.items()).backward()
    optimizer.step()
dist.destroy_process_group()
