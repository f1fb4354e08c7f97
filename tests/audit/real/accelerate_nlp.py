# SPDX-License-Identifier: Apache-2.0
"""Accelerate's first example: a classifier of pairs, a schedule, a metric of `evaluate`."""

import evaluate  # noqa: F401
import torch
from _pairs import Accuracy, loaders, model
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import get_linear_schedule_with_warmup

accelerator = Accelerator(cpu=True)
metric = Accuracy()
set_seed(42)
train_loader, eval_loader = loaders()
network = model().to(accelerator.device)
optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 2 * len(train_loader))
network, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
    network, optimizer, train_loader, eval_loader, schedule
)
for epoch in range(2):
    network.train()
    for batch in train_loader:
        accelerator.backward(network(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    network.eval()
    for batch in eval_loader:
        with torch.no_grad():
            predictions = network(**batch).logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        metric.add_batch(predictions=predictions, references=references)
    accelerator.print(f"epoch {epoch}:", metric.compute())
accelerator.end_training()
