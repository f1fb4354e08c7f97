# SPDX-License-Identifier: Apache-2.0
"""Accelerate's example of memory: a batch size that is halved until it fits."""

import evaluate  # noqa: F401
import torch
from _pairs import loaders, model
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from transformers import get_linear_schedule_with_warmup

accelerator = Accelerator(cpu=True)
tried = []


@find_executable_batch_size(starting_batch_size=16)
def train(batch_size):
    accelerator.free_memory()
    set_seed(42)
    train_loader, _ = loaders(batch_size)
    network = model().to(accelerator.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 2 * len(train_loader))
    network, optimizer, train_loader, schedule = accelerator.prepare(
        network, optimizer, train_loader, schedule
    )
    tried.append(batch_size)
    for _ in range(2):
        network.train()
        for batch in train_loader:
            loss = network(**batch).loss
            if batch_size > 4:
                raise RuntimeError("CUDA out of memory.")
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


train()
assert tried[0] == 16, tried
assert tried[-1] == 4, tried
accelerator.end_training()
