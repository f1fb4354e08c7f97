# SPDX-License-Identifier: Apache-2.0
"""An operator as RaySGD's users wrote it, which runs here as it stands."""

import torch
from problem import EPOCHS, GLOBAL_BATCH, WORKERS, data, make_model, say_distance
from torch import nn
from torch.utils.data import DataLoader

# Before: from ray.util.sgd import TorchTrainer
#         from ray.util.sgd.torch import TrainingOperator
#         from ray.util.sgd.utils import BATCH_SIZE
from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE


class Digits(TrainingOperator):
    def setup(self, config):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader = DataLoader(data(), batch_size=config[BATCH_SIZE])
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            schedulers=scheduler,
        )
        self.register_data(train_loader=loader, validation_loader=loader)


class OwnStep(Digits):
    def train_batch(self, batch, batch_info):
        images, target = batch
        loss = self.criterion(self.model(images), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


def trained(operator):
    trainer = TorchTrainer(
        training_operator_cls=operator,
        num_workers=WORKERS,
        config={"lr": 0.1, BATCH_SIZE: GLOBAL_BATCH},
        scheduler_step_freq="epoch",
    )
    for _ in range(EPOCHS):
        print(f"train_loss {trainer.train()['train_loss']:.4f}", end=", ")
        print(f"val_accuracy {trainer.validate()['val_accuracy']:.3f}")
    model = trainer.get_model()
    trainer.shutdown()
    return model


if __name__ == "__main__":
    say_distance(trained(Digits), trained(OwnStep))
