# SPDX-License-Identifier: Apache-2.0
"""L: groups by the names of layers miss one, which then no optimizer holds."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential()
for name, part in {"body": nn.Linear(4, 16), "pre_head": nn.Linear(16, 2)}.items():
    net.add_module(name, part)
net.add_module("head", nn.Linear(2, 2))
model = DistributedDataParallel(net)
groups = [
    {"params": [p for n, p in net.named_parameters() if n.startswith(layer)], "lr": rate}
    for layer, rate in {"body.": 0.1, "head.": 0.2}.items()
]
optimizer = torch.optim.SGD(groups)  # here LS402
source = torch.Generator().manual_seed(dist.get_rank())
for _ in range(4):
    x, y = torch.randn(6, 4, generator=source), torch.randint(2, (6,), generator=source)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
