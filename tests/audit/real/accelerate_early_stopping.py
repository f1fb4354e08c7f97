# SPDX-License-Identifier: Apache-2.0
"""Accelerate: a rank that has seen enough triggers, and all stop."""

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
model = tiny()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
for epoch in range(3):
    model.train()
    for place, batch in enumerate(train_loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.process_index == 1 and epoch == 1 and place == 3:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
accelerator.end_training()
