# SPDX-License-Identifier: Apache-2.0
"""transformers: a causal language model with the Trainer."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Text(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        source = torch.Generator().manual_seed(index)
        tokens = torch.randint(32, (12,), generator=source)
        labels = tokens.clone()
        labels[: index % 6] = -100
        return {"input_ids": tokens, "labels": labels}


set_seed(9)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    use_cpu=True,
    max_steps=8,
    per_device_train_batch_size=2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    logging_steps=4,
)
Trainer(model=model, args=arguments, train_dataset=Text()).train()
