# SPDX-License-Identifier: Apache-2.0
"""Accelerate's complete example: a state that is saved and loaded, batches that are skipped."""

import tempfile

import evaluate  # noqa: F401
import torch
from _pairs import Accuracy, loaders, model
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from transformers import get_linear_schedule_with_warmup

accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
(folder,) = broadcast_object_list([tempfile.mkdtemp()])
set_seed(42)
train_loader, eval_loader = loaders()
network = model().to(accelerator.device)
optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 4 * len(train_loader))
network, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
    network, optimizer, train_loader, eval_loader, schedule
)
metric = Accuracy()


def epoch(batches):
    network.train()
    total = 0.0
    for batch in batches:
        loss = network(**batch).loss
        total += loss.detach().float()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    network.eval()
    for batch in eval_loader:
        with torch.no_grad():
            predictions = network(**batch).logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        metric.add_batch(predictions=predictions, references=references)
    accelerator.print({**metric.compute(), "train_loss": total.item() / len(train_loader)})


epoch(train_loader)
accelerator.save_state(f"{folder}/epoch_0")
epoch(train_loader)
accelerator.load_state(f"{folder}/epoch_0")
epoch(accelerator.skip_first_batches(train_loader, 1))
accelerator.wait_for_everyone()
accelerator.end_training()
