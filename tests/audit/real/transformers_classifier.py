# SPDX-License-Identifier: Apache-2.0
"""transformers: sequence classification, with padding, evaluation and metrics."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Sentences(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        source = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 32, (4 + index % 5,), generator=source)
        return {"input_ids": tokens, "label": index % 2}


def padded(rows):
    ids = torch.nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], batch_first=True)
    labels = torch.tensor([r["label"] for r in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


set_seed(10)
config = BertConfig(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    use_cpu=True,
    max_steps=8,
    per_device_train_batch_size=2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    logging_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    weight_decay=0.01,
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=arguments,
    train_dataset=Sentences(),
    eval_dataset=Sentences(),
    data_collator=padded,
    compute_metrics=accuracy,
)
trainer.train()
print(trainer.evaluate()["eval_accuracy"])
