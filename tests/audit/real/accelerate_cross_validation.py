# SPDX-License-Identifier: Apache-2.0
"""Accelerate: a model for each fold, one after the other."""

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
rows = list(pairs(60))
for fold in range(3):
    held_out = rows[fold::3]
    kept = [row for place, row in enumerate(rows) if place % 3 != fold]
    train_loader = DataLoader(
        Dataset.from_list(kept), shuffle=True, collate_fn=collated, batch_size=4
    )
    eval_loader = DataLoader(Dataset.from_list(held_out), collate_fn=collated, batch_size=4)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, train_loader, eval_loader
    )
    model.train()
    for batch in train_loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    logits = []
    for batch in eval_loader:
        with torch.no_grad():
            logits.append(accelerator.gather_for_metrics(model(**batch).logits))
    assert len(torch.cat(logits)) == len(held_out)
accelerator.end_training()
