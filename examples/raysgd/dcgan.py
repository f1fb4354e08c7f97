# SPDX-License-Identifier: Apache-2.0
"""RaySGD's DCGAN: two convolutional models with batch norm, two optimizers, one step of one's own.

    python examples/raysgd/dcgan.py --num-workers 2

The discriminator's backward lies between the generator's forward and its backward, and both models
have buffers. Nothing in the program says how many workers there are. The images are scikit-learn's
digits of 8 x 8 pixels, so nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE


def make_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 2, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )


def make_generator(latent: int) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(latent, 32, 2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


class DCGAN(TrainingOperator):
    def setup(self, config):
        discriminator, generator = make_discriminator(), make_generator(config["latent"])
        optimizers = [
            torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.999))
            for model, lr in ((discriminator, config["lr"]), (generator, config["lr"] / 4))
        ]
        self.models, self.optimizers, self.criterion = self.register(
            models=(discriminator, generator), optimizers=optimizers, criterion=nn.BCELoss()
        )
        images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        loader = DataLoader(TensorDataset(images), batch_size=config[BATCH_SIZE], shuffle=True)
        self.register_data(train_loader=loader)

    def train_batch(self, batch, batch_info):
        discriminator, generator = self.models
        for_discriminator, for_generator = self.optimizers
        real = batch[0].to(self.device)
        ones, zeros = (
            torch.ones(len(real), device=real.device),
            torch.zeros(len(real), device=real.device),
        )

        for_discriminator.zero_grad()
        on_real = self.criterion(discriminator(real), ones)
        on_real.backward()
        noise = torch.randn(len(real), self.config["latent"], 1, 1, device=self.device)
        fake = generator(noise)
        on_fake = self.criterion(discriminator(fake.detach()), zeros)
        on_fake.backward()
        for_discriminator.step()

        for_generator.zero_grad()
        fooled = self.criterion(discriminator(fake), ones)
        fooled.backward()
        for_generator.step()
        return {
            "loss_g": fooled.item(),
            "loss_d": on_real.item() + on_fake.item(),
            "num_samples": len(real),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    trainer = TorchTrainer(
        training_operator_cls=DCGAN,
        num_workers=arguments.num_workers,
        config={"lr": 2e-4, "latent": 16, BATCH_SIZE: 64},
    )
    for _ in range(arguments.epochs):
        result = trainer.train()
        print(
            f"epoch {result['epoch']}  loss_d {result['loss_d']:.4f}  loss_g {result['loss_g']:.4f}"
        )
    _, generator = trainer.get_model()
    trainer.shutdown()
    with torch.no_grad():
        images = generator.eval()(torch.randn(16, 16, 1, 1))
    print(f"drew {len(images)} images of {images.shape[-2]} x {images.shape[-1]} pixels")


if __name__ == "__main__":
    main()
