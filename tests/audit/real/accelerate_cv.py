# SPDX-License-Identifier: Apache-2.0
"""Accelerate's example of images: a frozen body, a new head, one cycle of learning rates."""

import datasets
import evaluate  # noqa: F401
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import ResNetConfig, ResNetForImageClassification

set_seed(42)
accelerator = Accelerator(cpu=True)
numbers = np.random.default_rng(5)
images = datasets.Dataset.from_dict(
    {
        "image": numbers.normal(size=(32, 3, 16, 16)).astype("float32").tolist(),
        "label": numbers.integers(0, 3, 32).tolist(),
    }
).with_format("torch")
split = images.train_test_split(test_size=8, seed=1)
train_loader = DataLoader(split["train"], shuffle=True, batch_size=4, drop_last=True)
eval_loader = DataLoader(split["test"], batch_size=4)
shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
model = ResNetForImageClassification(ResNetConfig(num_labels=3, **shape))
for parameter in model.parameters():
    parameter.requires_grad = False
for parameter in model.classifier.parameters():
    parameter.requires_grad = True
mean = torch.zeros(3, 1, 1)
optimizer = torch.optim.Adam(params=model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.03, epochs=2, steps_per_epoch=len(train_loader)
)
model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, schedule
)
for epoch in range(2):
    model.train()
    for batch in train_loader:
        outputs = model(batch["image"] - mean).logits
        loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    right = total = 0
    for batch in eval_loader:
        with torch.no_grad():
            outputs = model(batch["image"] - mean).logits
        predictions, labels = accelerator.gather_for_metrics((outputs.argmax(-1), batch["label"]))
        right += (predictions == labels).long().sum()
        total += labels.shape[0]
    accelerator.print(f"epoch {epoch}: {right.item() / total:.2f}")
accelerator.end_training()
