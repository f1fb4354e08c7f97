# SPDX-License-Identifier: Apache-2.0
"""Two models, two optimizers, one step of one's own: a GAN that draws digits.

    python examples/gan.py

Each `backward` of `train_batch` is synchronised between the workers on its own, because the
synchronisation hangs on the parameters and not on a wrapper around the models.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator

SHADES = " .:-=+*#%@"


class DigitGAN(TrainingOperator):
    def setup(self, config):
        self.latent = config["latent"]
        generator = nn.Sequential(
            nn.Linear(self.latent, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
        )
        critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
        adam = {"lr": config["lr"], "betas": (0.5, 0.999)}
        (self.generator, self.critic), (self.generator_step, self.critic_step) = self.register(
            models=(generator, critic),
            optimizers=(
                torch.optim.Adam(generator.parameters(), **adam),
                torch.optim.Adam(critic.parameters(), **adam),
            ),
        )
        images = torch.tensor(load_digits().data, dtype=torch.float32).div(16)
        self.register_data(
            train_loader=DataLoader(TensorDataset(images), config["batch_size"], shuffle=True)
        )

    def train_batch(self, batch, batch_info):
        (real,) = self.to_device(batch)
        fake = self.generator(torch.randn(len(real), self.latent, device=self.device))

        self.critic_step.zero_grad()
        on_real, on_fake = self.critic(real), self.critic(fake.detach())
        critic_loss = bce(on_real, torch.ones_like(on_real)) + bce(
            on_fake, torch.zeros_like(on_fake)
        )
        critic_loss.backward()
        self.critic_step.step()

        self.generator_step.zero_grad()
        judged = self.critic(fake)
        generator_loss = bce(judged, torch.ones_like(judged))
        generator_loss.backward()
        self.generator_step.step()
        return {
            "critic_loss": critic_loss.item(),
            "generator_loss": generator_loss.item(),
            "num_samples": len(real),
        }


def drawn(image: torch.Tensor) -> list[str]:
    """An image of 8 x 8 pixels in [0, 1] as lines of text."""
    levels = (image.view(8, 8) * (len(SHADES) - 1)).round().int().tolist()
    return ["".join(SHADES[level] * 2 for level in row) for row in levels]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=60)
    arguments = parser.parse_args()
    config = {"lr": 1e-3, "latent": 16, "batch_size": 32}
    with TorchTrainer(
        training_operator_cls=DigitGAN, num_workers=arguments.num_workers, config=config
    ) as trainer:
        for epoch in range(arguments.epochs):
            result = trainer.train()
            if epoch % 10 == 9 or epoch + 1 == arguments.epochs:
                print(
                    f"epoch {result['epoch']:3}  critic {result['critic_loss']:.3f}"
                    f"  generator {result['generator_loss']:.3f}"
                )
        generator, _ = trainer.get_model()
    noise = torch.randn(4, config["latent"], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pictures = [drawn(image) for image in generator(noise)]
    for rows in zip(*pictures, strict=True):
        print("   ".join(rows))


if __name__ == "__main__":
    main()
