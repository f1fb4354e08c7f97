# SPDX-License-Identifier: Apache-2.0
"""An operator that learns handwritten digits in seconds; the pages in docs/how-to use it."""

import torch
from digits import digits
from torch import nn
from torch.utils.data import DataLoader

from lockstep import TrainingOperator
from lockstep.keys import BATCH_SIZE


class SmallDigits(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9),
            criterion=nn.CrossEntropyLoss(),
        )
        train, validation = digits()
        self.register_data(
            train_loader=DataLoader(train, config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(validation, config[BATCH_SIZE]),
        )
