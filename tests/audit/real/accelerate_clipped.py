# SPDX-License-Identifier: Apache-2.0
"""Accelerate: accumulates, clips what was reduced, and logs means over the ranks."""

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
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
rows = Dataset.from_list(list(pairs(64)))
train_loader = DataLoader(rows, shuffle=True, collate_fn=collated, batch_size=4)
model = tiny()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
for _ in range(2):
    model.train()
    total = torch.zeros(1)
    for batch in train_loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            total += loss.detach()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean = accelerator.reduce(total, reduction="mean")
    accelerator.print(f"loss {mean.item() / len(train_loader):.3f}")
accelerator.end_training()
