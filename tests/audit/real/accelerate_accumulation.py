# SPDX-License-Identifier: Apache-2.0
"""Accelerate: gradient accumulation, clipping, a checkpoint and its return."""

import tempfile

import evaluate  # asks whether there is a torch before anybody has imported it
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

assert evaluate.__version__
set_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
data = TensorDataset(torch.randn(56, 8), torch.randint(3, (56,)))
loader = DataLoader(data, shuffle=True, batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with tempfile.TemporaryDirectory() as folder:
    folder = broadcast_object_list([folder])[0]
    for epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(folder)
        elif epoch == 1:
            accelerator.load_state(folder)
        accelerator.wait_for_everyone()
accelerator.end_training()
