# SPDX-License-Identifier: Apache-2.0
"""A stem and its norm are each rank's own, and DDP is told so; the trunk is shared."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3 + rank)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.trunk = nn.Linear(8, 4)
        self.head = nn.Linear(4, 2 + rank)

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(self.stem(x))))


net = Net()
tensors = [*net.named_parameters(), *net.named_buffers()]
own = [name for name, _ in tensors if not name.startswith("trunk.")]
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, own)
model = DistributedDataParallel(net)
shared = torch.optim.SGD(net.trunk.parameters(), lr=0.1, momentum=0.9)
private = torch.optim.AdamW([*net.stem.parameters(), *net.head.parameters()], lr=0.01)
x = torch.randn(64, 6) * (1 + rank)
y = torch.randint(0, 2 + rank, (64,))
for step in range(6):
    rows = slice(8 * step, 8 * step + 8)
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    shared.zero_grad()
    private.zero_grad()
    loss.backward()
    shared.step()
    private.step()
    net.eval()
    with torch.no_grad():
        net(x[:16])
    net.train()
dist.destroy_process_group()
