# SPDX-License-Identifier: Apache-2.0
"""One LightningModule, trained by Lightning's trainer and by lockstep's."""

import logging
import warnings

import lightning
import torch
from problem import EPOCHS, GLOBAL_BATCH, WORKERS, data, make_model, say_distance
from torch import nn
from torch.utils.data import DataLoader

from lockstep import TorchTrainer, TrainingOperator


class Digits(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.model = make_model()

    def training_step(self, batch, batch_idx):
        images, target = batch
        loss = nn.functional.cross_entropy(self.model(images), target)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, target = batch
        hits = self.model(images).argmax(dim=1) == target
        self.log("accuracy", hits.double().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def with_lightning():
    module = Digits(lr=0.1)
    trainer = lightning.Trainer(max_epochs=EPOCHS, gradient_clip_val=1.0, **QUIET)
    trainer.fit(module, DataLoader(data(), GLOBAL_BATCH), DataLoader(data(), GLOBAL_BATCH))
    return module


def with_lockstep():
    loader = DataLoader(data(), GLOBAL_BATCH // WORKERS)
    operator = TrainingOperator.from_lightning(Digits, loader, loader, gradient_clip_val=1.0)
    with TorchTrainer(
        training_operator_cls=operator, num_workers=WORKERS, config={"lr": 0.1}
    ) as trainer:
        for _ in range(EPOCHS):
            trained, validated = trainer.train(), trainer.validate()
            print(f"loss {trained['loss']:.4f}, accuracy {validated['accuracy']:.3f}")
        return trainer.get_model()


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    say_distance(with_lightning(), with_lockstep())
