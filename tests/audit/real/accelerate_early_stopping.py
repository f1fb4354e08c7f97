# SPDX-License-Identifier: Apache-2.0
"""Accelerate's example of early stopping: any rank's wish to stop is heard by all."""

import evaluate  # noqa: F401
import torch
from _pairs import loaders, model
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import get_linear_schedule_with_warmup

accelerator = Accelerator(cpu=True)
set_seed(42)
train_loader, eval_loader = loaders(batch_size=4)
network = model().to(accelerator.device)
optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 4 * len(train_loader))
network, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
    network, optimizer, train_loader, eval_loader, schedule
)
steps, best, waited = 0, float("inf"), 0
for _ in range(4):
    network.train()
    for batch in train_loader:
        loss = network(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps += 1
        waited = 0 if loss.item() < best else waited + 1
        best = min(best, loss.item())
        if waited > 3 and steps > 5:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    else:
        continue
    break
accelerator.print(f"{steps} steps")
accelerator.end_training()
