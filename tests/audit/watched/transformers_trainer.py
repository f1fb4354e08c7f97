# SPDX-License-Identifier: Apache-2.0
"""`TransformersWatch` in the Trainer of transformers; wrong: the loss goes round the wrapper."""

import tempfile

import torch
from _tried import try_out
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from lockstep.integrations.transformers_watch import TransformersWatch


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        features = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"features": features, "labels": features.sum()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, features, labels):
        return {"loss": nn.functional.mse_loss(self.layers(features)[:, 0], labels)}


class OurTrainer(Trainer):
    how = "right"

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.how == "raises" and self.state.global_step == 2:
            raise KeyError("no such row")
        called = model.module if self.how == "wrong" else model
        return super().compute_loss(called, inputs, *args, **kwargs)


def train(watch, how):
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    net = Net()
    callbacks = [] if watch is None else [watch]
    trainer = OurTrainer(net, arguments, train_dataset=Rows(), callbacks=callbacks)
    trainer.how = how
    trainer.train()
    return net


try_out(train, TransformersWatch)
