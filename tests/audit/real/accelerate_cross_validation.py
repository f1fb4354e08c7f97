# SPDX-License-Identifier: Apache-2.0
"""Accelerate's example of cross-validation: a model for each fold, and the mean of their logits."""

import datasets
import evaluate  # noqa: F401
import numpy as np
import torch
from _pairs import Accuracy, collate, model, pairs
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
set_seed(42)
split = pairs(64).train_test_split(test_size=16, seed=1)
folds = np.arange(48).reshape(3, 16)
test_loader = DataLoader(split["test"], collate_fn=collate, batch_size=4)
test_predictions, references = [], None
for number in range(3):
    rows = np.concatenate([folds[other] for other in range(3) if other != number])
    train = datasets.Dataset.from_dict(split["train"].select(rows)[:])
    valid = split["train"].select(folds[number])
    network = model().to(accelerator.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    network, optimizer, train_loader, valid_loader, schedule, fold_test = accelerator.prepare(
        network,
        optimizer,
        DataLoader(train, shuffle=True, collate_fn=collate, batch_size=4),
        DataLoader(valid, collate_fn=collate, batch_size=4),
        schedule,
        test_loader,
    )
    network.train()
    for batch in train_loader:
        accelerator.backward(network(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    network.eval()
    metric = Accuracy()
    for batch in valid_loader:
        with torch.no_grad():
            found = network(**batch).logits.argmax(dim=-1)
        found, labels = accelerator.gather_for_metrics((found, batch["labels"]))
        metric.add_batch(predictions=found, references=labels)
    accelerator.print(f"fold {number}:", metric.compute())
    logits, labels = [], []
    for batch in fold_test:
        with torch.no_grad():
            found = accelerator.gather_for_metrics((network(**batch).logits, batch["labels"]))
        logits.append(found[0].cpu())
        labels.append(found[1].cpu())
    test_predictions.append(torch.cat(logits))
    references = torch.cat(labels)
mean = torch.stack(test_predictions).mean(dim=0).argmax(dim=-1)
accelerator.print("all folds:", Accuracy().compute(predictions=mean, references=references))
accelerator.end_training()
