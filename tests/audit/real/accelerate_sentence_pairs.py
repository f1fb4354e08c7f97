# SPDX-License-Identifier: Apache-2.0
"""Accelerate: a classifier of texts that are padded batch by batch, with a schedule."""

import evaluate  # asks whether there is a torch before anybody has imported it
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

assert evaluate.__version__


def pairs(count):
    source = torch.Generator().manual_seed(count)
    for _ in range(count):
        length = int(torch.randint(4, 12, (1,), generator=source))
        tokens = torch.randint(1, 32, (length,), generator=source).tolist()
        yield {"input_ids": tokens, "labels": int(sum(tokens) > 16 * length)}


def collated(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    ids = torch.tensor(padded)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def tiny():
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
    )


set_seed(42)
accelerator = Accelerator(cpu=True)
rows = Dataset.from_list(list(pairs(64)))
train_loader = DataLoader(rows, shuffle=True, collate_fn=collated, batch_size=4)
eval_loader = DataLoader(Dataset.from_list(list(pairs(22))), collate_fn=collated, batch_size=4)
model = tiny()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=16)
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
for _ in range(2):
    model.train()
    for batch in train_loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    seen = 0
    for batch in eval_loader:
        with torch.no_grad():
            predicted = model(**batch).logits.argmax(-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
        seen += len(labels)
    assert seen == 22
accelerator.end_training()
