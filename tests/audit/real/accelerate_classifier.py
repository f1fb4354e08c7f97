# SPDX-License-Identifier: Apache-2.0
"""Accelerate: prepare everything, backward through the accelerator, gather for metrics."""

import evaluate  # asks whether there is a torch before anybody has imported it
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

assert evaluate.__version__
set_seed(42)
accelerator = Accelerator(cpu=True)
features = torch.randn(50, 8)
data = TensorDataset(features, (features.sum(1) > 0).long())
train_loader = DataLoader(data, shuffle=True, batch_size=4)
eval_loader = DataLoader(data, batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
for _ in range(2):
    model.train()
    for x, y in train_loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    right = total = 0
    for x, y in eval_loader:
        with torch.no_grad():
            predicted = model(x).argmax(1)
        predicted, y = accelerator.gather_for_metrics((predicted, y))
        right, total = right + (predicted == y).sum().item(), total + len(y)
    assert total == len(data)
    accelerator.print(f"accuracy {right / total:.2f}")
accelerator.end_training()
