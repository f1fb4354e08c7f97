# SPDX-License-Identifier: Apache-2.0
"""What training keeps in buffers: a centre that ranks add up, and counts that no gradient needs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
source = torch.Generator().manual_seed(1 + rank)


class Centred(nn.Module):
    """`centre` is of all ranks' rows. `running` is used in evaluation; `load` counts rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("load", torch.zeros(1))
        self.register_buffer("bias", torch.zeros(1))

    def forward(self, x):
        out = self.body(self.norm(x))
        mean = out.detach().mean(0)
        self.running.lerp_(mean, 0.1)
        self.load += (out.detach() > 0).sum()
        of_all = mean / world
        dist.all_reduce(of_all)
        result = out - self.centre + self.bias
        self.centre = 0.9 * self.centre + 0.1 * of_all
        return result

    def balance(self):
        of_all = self.load.clone()
        dist.all_reduce(of_all)
        self.bias += 0.01 * torch.sign(of_all - 9.0)
        self.load.zero_()


class Queue(nn.Module):
    """Rows of this rank's own, a part of which each forward replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(12, 3))
        self.next = 0

    def forward(self, out):
        result = (out @ self.rows.clone().T).logsumexp(1).mean()
        with torch.no_grad():
            self.rows[self.next : self.next + 6] = out.detach()
        self.next = (self.next + 6) % 12
        return result


net = Centred()
model = DistributedDataParallel(net, broadcast_buffers=False)
queue = Queue()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    x, y = torch.randn(6, 4, generator=source), torch.randint(3, (6,), generator=source)
    optimizer.zero_grad()
    out = model(x)
    (nn.functional.cross_entropy(out, y) + 0.1 * queue(out)).backward()
    optimizer.step()
    net.balance()
