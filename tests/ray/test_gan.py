# SPDX-License-Identifier: Apache-2.0
"""RaySGD's DCGAN: two normalised models, and one output that two backwards need."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE

ROWS, GLOBAL_BATCH, STEPS = 24, 8, 6
LATENT = 3


def problem():
    """Images (N, 1, 4, 4), and the noise that each rank draws for them (N, LATENT, 1, 1)."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(ROWS, 1, 4, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, LATENT, 1, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(images, noise)


def players():
    torch.manual_seed(3)
    discriminator = nn.Sequential(
        nn.Conv2d(1, 4, 2, 2, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4, 4, 2, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4, 1, 1),
        nn.Flatten(0),
    )
    generator = nn.Sequential(
        nn.ConvTranspose2d(LATENT, 4, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 1, 2, 2),
        nn.Tanh(),
    )
    return discriminator.double(), generator.double()


def optimizers_of(models):
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]


def judged(output, is_real):
    goal = torch.full_like(output, float(is_real))
    return nn.functional.binary_cross_entropy_with_logits(output, goal)


def play(models, optimizers, parts, backward=lambda losses: losses[0].backward()):
    """One step of both players; each of `parts`, images and noise, has statistics of its own."""
    (discriminator, generator), (for_discriminator, for_generator) = models, optimizers
    for_discriminator.zero_grad()
    backward([judged(discriminator(images), True) for images, _ in parts])
    fakes = [generator(noise) for _, noise in parts]
    backward([judged(discriminator(fake.detach()), False) for fake in fakes])
    for_discriminator.step()
    for_generator.zero_grad()
    losses = [judged(discriminator(fake), True) for fake in fakes]
    backward(losses)
    for_generator.step()
    return sum(loss.item() for loss in losses) / len(losses)


class DCGAN(TrainingOperator):
    def setup(self, config):
        models = players()
        self.models, self.optimizers = self.register(
            models=models, optimizers=optimizers_of(models)
        )
        self.register_data(train_loader=DataLoader(problem(), config[BATCH_SIZE]))

    def train_batch(self, batch, batch_info):
        return {"generator_loss": play(self.models, self.optimizers, [batch])}


def backward_of_the_mean(losses):
    (sum(losses) / len(losses)).backward()


def one_process(num_parts):
    """The same game by plain autograd: the mean over the parts, each normalised by itself."""
    models = players()
    optimizers = optimizers_of(models)
    images, noise = problem().tensors
    losses = []
    for step in range(STEPS):
        rows = slice(step % 3 * GLOBAL_BATCH, (step % 3 + 1) * GLOBAL_BATCH)
        parts = zip(images[rows].chunk(num_parts), noise[rows].chunk(num_parts), strict=True)
        losses.append(
            play(
                models, optimizers, list(parts), lambda found: (sum(found) / len(found)).backward()
            )
        )
    return models, sum(losses[:3]) / 3


@pytest.mark.parametrize("sync", ["replicate", "ddp"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_gan_with_batch_norm(workers, sync):
    with TorchTrainer(
        training_operator_cls=DCGAN,
        num_workers=workers,
        sync=sync,
        config={BATCH_SIZE: GLOBAL_BATCH},
    ) as trainer:
        results = [trainer.train(), trainer.train()]
        trained = trainer.get_model()
    expected, loss = one_process(workers)
    assert results[0]["generator_loss"] == pytest.approx(loss, rel=1e-10)
    for model, other in zip(trained, expected, strict=True):
        for mine, true in zip(model.parameters(), other.parameters(), strict=True):
            assert (mine - true).abs().max() < 1e-12
