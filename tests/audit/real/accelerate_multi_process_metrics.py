# SPDX-License-Identifier: Apache-2.0
"""Accelerate's example of metrics: rows that were repeated are left out by hand."""

import evaluate  # noqa: F401
import torch
from _pairs import Accuracy, collate, loaders, model, pairs
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

accelerator = Accelerator(cpu=True)
metric = Accuracy()
set_seed(42)
train_loader, _ = loaders()
eval_loader = DataLoader(pairs(21), collate_fn=collate, batch_size=4)
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
    seen = 0
    for step, batch in enumerate(eval_loader):
        with torch.no_grad():
            predictions = network(**batch).logits.argmax(dim=-1)
        predictions, references = accelerator.gather((predictions, batch["labels"]))
        if accelerator.use_distributed:
            if step == len(eval_loader) - 1:
                predictions = predictions[: len(eval_loader.dataset) - seen]
                references = references[: len(eval_loader.dataset) - seen]
            else:
                seen += references.shape[0]
        metric.add_batch(predictions=predictions, references=references)
    accelerator.print(f"epoch {epoch}:", metric.compute())
accelerator.end_training()
