# SPDX-License-Identifier: Apache-2.0
"""Accelerate: ranks train apart for some steps and are averaged."""

import evaluate  # asks whether there is a torch before anybody has imported it
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

assert evaluate.__version__
set_seed(2)
accelerator = Accelerator(cpu=True)
data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, shuffle=True, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local:
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
accelerator.end_training()
