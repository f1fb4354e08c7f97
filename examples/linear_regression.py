# SPDX-License-Identifier: Apache-2.0
"""RaySGD's first page, on lockstep: fit y = 2 x + 5 with two workers.

python examples/linear_regression.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lockstep import TorchTrainer, TrainingOperator


class LinearDataset(Dataset):
    """y = a x + b on `size` points of [0, 10)."""

    def __init__(self, a, b, size=1000):
        self.x = torch.arange(size, dtype=torch.float32).mul(10 / size).unsqueeze(1)
        self.y = a * self.x + b

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)


class LinearRegression(TrainingOperator):
    def setup(self, config):
        train_loader = DataLoader(LinearDataset(2, 5), config["batch_size"], shuffle=True)
        validation_loader = DataLoader(LinearDataset(2, 5, size=400), config["batch_size"])
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=scheduler
        )
        self.register_data(train_loader=train_loader, validation_loader=validation_loader)


def main() -> None:
    trainer = TorchTrainer(
        training_operator_cls=LinearRegression,
        num_workers=2,
        config={"lr": 0.02, "batch_size": 32},  # not BATCH_SIZE, so 32 for each worker
        scheduler_step_freq="epoch",
    )
    for epoch in range(1, 61):
        trainer.train()
        if epoch % 15 == 0:
            print(f"epoch {epoch}  validation loss {trainer.validate()['val_loss']:.6f}")
    model = trainer.get_model()
    print(f"y = {model.weight.item():.3f} x + {model.bias.item():.3f}")
    trainer.shutdown()


if __name__ == "__main__":
    main()
