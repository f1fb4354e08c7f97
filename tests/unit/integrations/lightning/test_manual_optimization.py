# SPDX-License-Identifier: Apache-2.0
"""Modules that step their optimizers themselves get the weights of Lightning's own trainer."""

import lightning
import pytest
import torch
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    Classifier,
    by_lightning,
    farthest,
    loader,
    problem,
)
from tests.unit.integrations.lightning.two_threads import on_two_threads
from torch import nn
from torch.utils.data import DataLoader, Subset

import lockstep
from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.keys import WEIGHT
from lockstep.worker import LoopRequest

pytestmark = pytest.mark.filterwarnings(
    # Lightning's advice on loader workers and logging intervals, and its use of older torch.
    "ignore::UserWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


class Gan(lightning.LightningModule):
    """The two networks of Lightning's GAN tutorial; the noise is a function of the samples."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        generator = torch.Generator().manual_seed(11)
        self.generator = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()
        self.discriminator = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def _score(self, samples, target):
        scores = self.discriminator(samples)
        wanted = torch.full_like(scores, target)
        return nn.functional.binary_cross_entropy_with_logits(scores, wanted)

    def training_step(self, batch, batch_idx):
        real, _ = batch
        noise = torch.sin(7 * real)
        optimizer_g, optimizer_d = self.optimizers()

        self.toggle_optimizer(optimizer_g)
        g_loss = self._score(self.generator(noise), 1.0)
        self.log("g_loss", g_loss, prog_bar=True, on_epoch=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        fake = self.generator(noise).detach()
        d_loss = (self._score(real, 1.0) + self._score(fake, 0.0)) / 2
        self.log("d_loss", d_loss, prog_bar=True, on_epoch=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.999))
        optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=0.02, betas=(0.5, 0.9))
        return [optimizer_g, optimizer_d], []


class StepsTheDiscriminatorOften(Gan):
    """The generator steps in every third batch; hooks, a closure and toggle_model are used."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def training_step(self, batch, batch_idx):
        real, _ = batch
        noise = torch.cos(5 * real)
        optimizer_g, optimizer_d = self.optimizers()

        def d_closure():
            optimizer_d.zero_grad()
            fake = self.generator(noise).detach()
            loss = self._score(real, 1.0) + self._score(fake, 0.0)
            self.manual_backward(loss)
            return loss

        with optimizer_d.toggle_model():
            d_loss = optimizer_d.step(closure=d_closure)
        if batch_idx % 3 == 0:
            with self.toggled_optimizer(optimizer_g):
                optimizer_g.zero_grad()
                self.manual_backward(self._score(self.generator(noise), 1.0))
                optimizer_g.step()
        return {"loss": d_loss}

    def on_before_backward(self, loss):
        self.calls.append("before_backward")

    def on_after_backward(self):
        self.calls.append("after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.calls.append(f"before_step at {self.global_step}")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(f"batch_end {batch_idx} at {self.global_step}")


class Manual(Classifier):
    """Leaves to its subclasses how the one optimizer steps."""

    def __init__(self, width=7, lr=0.3):
        super().__init__(width, lr)
        self.automatic_optimization = False


class Accumulates(Manual):
    """Lightning's documented way to accumulate gradients, with clipping and schedulers."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers()[0].step()

    def on_train_epoch_end(self):
        self.lr_schedulers()[1].step(self.trainer.callback_metrics["train_loss_epoch"])

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        often = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.9, factor=0.3
        )
        return [optimizer], [often, plateau]


class LightningModule(lightning.LightningModule):
    """A project's own base class, of the same name."""


class StepsTwice(LightningModule):
    """The second forward of a batch sees the weights after the first step; chosen late."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 2)

    def training_step(self, batch, batch_idx):
        features, target = batch
        for _ in range(2):
            loss = nn.functional.cross_entropy(self.layer(features.float()), target)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    def configure_optimizers(self):
        self.automatic_optimization = False
        return torch.optim.SGD(self.parameters(), lr=0.5)


class BackpropagatesTwice(Manual):
    """Two losses of one graph, by a `backward` of its own; in small steps, or rounding grows."""

    def __init__(self):
        super().__init__(lr=0.05)

    def training_step(self, batch, batch_idx):
        features, target = batch
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        output = self(features)
        self.manual_backward(nn.functional.cross_entropy(output, target), retain_graph=True)
        self.manual_backward(output.square().mean())
        optimizer.step()

    def backward(self, loss, *arguments, **keywords):
        (2 * loss).backward(*arguments, **keywords)


class MeansOverTokens(Manual):
    """A third of the targets are ignored; the loss is a mean over the others."""

    weighs = False

    def training_step(self, batch, batch_idx):
        features, target = batch
        target = torch.where(features[:, 2] > 0.4, -100, target)
        loss = nn.functional.cross_entropy(self(features), target, ignore_index=-100)
        weight = {"weight": int((target >= 0).sum())} if self.weighs else {}
        self.optimizers().zero_grad()
        self.manual_backward(loss / 2, None, True, **weight)  # Tensor.backward's retain_graph
        self.manual_backward(loss / 2, **weight)
        self.optimizers().step()


class Weighs(MeansOverTokens):
    weighs = True


class Contrasts(Manual):
    """Each row against all rows of the global batch."""

    def contrast(self, a, b):
        logits = 3.0 * nn.functional.normalize(a) @ nn.functional.normalize(b).T
        return nn.functional.cross_entropy(logits, torch.arange(len(a)))

    def training_step(self, batch, batch_idx):
        features, _ = batch
        loss = self.contrast(self(features), self(features.cos()))
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class ContrastsOverWorkers(Contrasts):
    def contrast(self, a, b):
        return super().contrast(lockstep.gather(a), lockstep.gather(b))


def rows(count, batch_size):
    return DataLoader(Subset(problem(), range(count)), batch_size)


@pytest.mark.parametrize("count", [2 * GLOBAL_BATCH + 5, 2 * GLOBAL_BATCH + 1])
@pytest.mark.parametrize(
    ("module_cls", "alone"), [(Weighs, MeansOverTokens), (ContrastsOverWorkers, Contrasts)]
)
def test_the_weight_of_a_loss_is_at_its_root(module_cls, alone, count):
    """In the last batch the two workers have 3 and 2 samples; or one, and none."""

    def body(worker):
        for _ in range(2):
            worker.train(LoopRequest("train", None, False, {}))
        return worker.operator.module

    train = rows(count, GLOBAL_BATCH)
    expected, _ = by_lightning(alone(), max_epochs=2, validates=False, train=train)
    made = TrainingOperator.from_lightning(module_cls, rows(count, GLOBAL_BATCH // 2))
    for module in on_two_threads(made, body):
        assert farthest(module, expected) < 1e-12


class ReturnsItsWeight(MeansOverTokens):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        return {WEIGHT: 3}


class WeighsAndBackpropagates(Weighs):
    def backward(self, loss, *arguments, **keywords):
        loss.backward(*arguments, **keywords)


@pytest.mark.parametrize(
    ("module_cls", "error", "says"),
    [
        (ReturnsItsWeight, ConfigurationError, r"manual_backward\(loss, weight=number\)"),
        (WeighsAndBackpropagates, NotAvailableError, "own backward takes none"),
    ],
)
def test_a_weight_that_would_not_reach_the_gradients_is_refused(module_cls, error, says):
    made = TrainingOperator.from_lightning(module_cls, loader())
    with TorchTrainer(training_operator_cls=made) as trainer, pytest.raises(error, match=says):
        trainer.train()


def by_lockstep(module_cls, num_workers):
    """The trained module, and what each `train` returned."""
    made = TrainingOperator.from_lightning(module_cls, loader(GLOBAL_BATCH // 2))
    with TorchTrainer(training_operator_cls=made, num_workers=num_workers, num_shards=2) as trainer:
        results = [trainer.train() for _ in range(3)]
        return trainer.get_model(), results


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_gan_of_the_tutorial(num_workers):
    expected, reference = by_lightning(Gan(), validates=False)
    model, results = by_lockstep(Gan, num_workers)
    assert farthest(model, expected) < 1e-12
    for name in ("g_loss", "d_loss"):
        # Lightning computes its epoch's mean in float32.
        logged = reference.callback_metrics[f"{name}_epoch"].item()
        assert results[-1][f"{name}_epoch"] == pytest.approx(logged, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module_cls", [StepsTheDiscriminatorOften, Accumulates, BackpropagatesTwice]
)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_other_ways_to_step(module_cls, num_workers):
    expected, _ = by_lightning(module_cls(), validates=False)
    model, _ = by_lockstep(module_cls, num_workers)
    assert farthest(model, expected) < 1e-12


def test_a_forward_under_bf16_sees_the_step_before_it():
    expected, _ = by_lightning(StepsTwice(), validates=False, precision="bf16-mixed")
    made = TrainingOperator.from_lightning(StepsTwice, loader())
    with TorchTrainer(training_operator_cls=made, use_local=True, precision="bf16") as trainer:
        for _ in range(3):
            trainer.train()
        assert farthest(trainer.get_model(), expected) < 1e-6
    # The class is that of any module again.
    automatic = {"accumulate": 2, "use_local": True}
    with pytest.raises(ConfigurationError, match="manual optimisation"):
        TorchTrainer(training_operator_cls=made, **automatic)


def test_whether_it_steps_itself_is_a_fact_of_one_operator():
    """A class trains modules of both kinds, and two trainers of it live at the same time."""
    expected, _ = by_lightning(Gan(), validates=False)
    automatic, _ = by_lightning(Classifier(), validates=False)
    made = TrainingOperator.from_lightning(
        lambda config: Gan() if config["gan"] else Classifier(), loader()
    )

    def trainer(gan):
        return TorchTrainer(training_operator_cls=made, config={"gan": gan}, use_local=True)

    with trainer(True) as first:
        for gan, reference in ((False, automatic), (True, expected)):
            with trainer(gan) as other:
                for _ in range(3):
                    other.train()
                assert farthest(other.get_model(), reference) < 1e-12
            first.train()
        first.train()
        assert farthest(first.get_model(), expected) < 1e-12


def test_hooks_come_in_lightnings_order():
    expected, reference = by_lightning(StepsTheDiscriminatorOften(), validates=False)
    module = StepsTheDiscriminatorOften()
    made = TrainingOperator.from_lightning(lambda config: module, loader())
    with TorchTrainer(training_operator_cls=made, use_local=True) as trainer:
        for _ in range(3):
            trained = trainer.train()
        view = module.trainer
        assert view.global_step == reference.global_step
    assert module.calls == expected.calls
    assert "train_loss" in trained


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint(tmp_path):
    expected, reference = by_lightning(Gan(), validates=False)
    made = TrainingOperator.from_lightning(Gan, loader(GLOBAL_BATCH // 2))
    with TorchTrainer(training_operator_cls=made, num_shards=2) as trainer:
        trainer.train()
        trainer.train(num_steps=2)
        trainer.save(tmp_path / "checkpoint")
    with TorchTrainer(training_operator_cls=made, num_workers=2, num_shards=2) as trainer:
        trainer.load(tmp_path / "checkpoint")
        trainer.train()
        trainer.train()
        assert farthest(trainer.get_model(), expected) < 1e-12
        steps = trainer.apply_all_operators(lambda operator: operator.module.global_step)
        assert steps == [reference.global_step] * 2


@pytest.mark.parametrize(
    ("operator", "arguments", "says"),
    [
        ({}, {"accumulate": 2}, "accumulate"),
        ({}, {"clip_grad_norm": 1.0}, "clip_grad_norm"),
        ({}, {"reproducible": True}, "reproducible"),
        ({}, {"precision": "fp16"}, "fp16"),
        ({"gradient_clip_val": 1.0}, {}, "gradient_clip_val"),
    ],
)
def test_options_of_automatic_steps_are_refused(operator, arguments, says):
    made = TrainingOperator.from_lightning(Gan, loader(), **operator)
    with pytest.raises(ConfigurationError, match="manual optimisation") as refusal:
        TorchTrainer(training_operator_cls=made, **arguments)
    assert says in str(refusal.value)


def test_manual_backward_of_an_automatic_module_is_refused_by_lightning():
    class Confused(Classifier):
        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))

    made = TrainingOperator.from_lightning(Confused, loader())
    with (
        pytest.raises(Exception, match="disable automatic optimization"),
        TorchTrainer(training_operator_cls=made, use_local=True) as trainer,
    ):
        trainer.train()


def test_lbfgs_is_refused():
    class Searches(Manual):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    made = TrainingOperator.from_lightning(Searches, loader())
    with pytest.raises(NotAvailableError, match="LBFGS"):
        TorchTrainer(training_operator_cls=made, use_local=True)
