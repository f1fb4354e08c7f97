# SPDX-License-Identifier: Apache-2.0
"""The same workload as an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import workload
from lockstep import TrainingOperator


class Classifier(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model = workload.make_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE),
            criterion=nn.CrossEntropyLoss(),
        )
        dataset = workload.make_dataset(config["num_steps"])
        batch_size = config.get("batch_size", workload.BATCH_SIZE)
        self.register_data(train_loader=DataLoader(dataset, batch_size=batch_size, shuffle=True))
