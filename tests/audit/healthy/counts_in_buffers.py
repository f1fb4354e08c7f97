# SPDX-License-Identifier: Apache-2.0
"""A forward in evaluation counts its rows in a buffer; the ranks' counts are added up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.register_buffer("right", torch.zeros(1))

    def forward(self, x, y):
        out = self.body(x)
        if not self.training:
            self.right += (out.argmax(1) == y).sum()
        return nn.functional.cross_entropy(out, y)


dist.init_process_group("gloo")
torch.manual_seed(0)
net = Counted()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.Generator().manual_seed(dist.get_rank())


def batch():
    return torch.randn(6, 4, generator=source), torch.randint(2, (6,), generator=source)


for _ in range(3):
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model(*batch()).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net.right.zero_()
        for _ in range(4):
            net(*batch())
    dist.all_reduce(net.right)
