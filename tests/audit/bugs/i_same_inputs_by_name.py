# SPDX-License-Identifier: Apache-2.0
"""I: a generator with one seed makes the batches of all ranks, which go in by name."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 1)

    def forward(self, inputs=None, targets=None):
        return nn.functional.mse_loss(self.scores(inputs), targets)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.Generator().manual_seed(0)
for _ in range(8):
    x, y = torch.randn(8, 4, generator=source), torch.randn(8, 1, generator=source)
    batch = {"inputs": x, "targets": y}
    optimizer.zero_grad()
    loss = model(**batch)  # here LS508
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
