# SPDX-License-Identifier: Apache-2.0
"""Accelerate's example of local SGD: ranks step by themselves, and average weights now and then."""

import evaluate  # noqa: F401
import torch
from _pairs import loaders, model
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from transformers import get_linear_schedule_with_warmup

accelerator = Accelerator(cpu=True)
set_seed(42)
train_loader, eval_loader = loaders(batch_size=4)
network = model().to(accelerator.device)
optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 3 * len(train_loader))
network, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
    network, optimizer, train_loader, eval_loader, schedule
)
for _ in range(3):
    network.train()
    with LocalSGD(
        accelerator=accelerator, model=network, local_sgd_steps=2, enabled=True
    ) as local_sgd:
        for batch in train_loader:
            with accelerator.accumulate(network):
                accelerator.backward(network(**batch).loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                local_sgd.step()
accelerator.end_training()
