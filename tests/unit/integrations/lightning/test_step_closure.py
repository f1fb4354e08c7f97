# SPDX-License-Identifier: Apache-2.0
"""The closure of `optimizer_step` returns the step's loss, and refuses to compute another one."""

import itertools

import pytest
import torch
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    SAMPLES,
    Classifier,
    by_lightning,
    farthest,
    loader,
)
from torch import nn

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import NotAvailableError

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


class Sam(torch.optim.SGD):
    """Steps with the gradient at the weights that are worst nearby."""

    @torch.no_grad()
    def climb(self, *, clears=True):
        params = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in params]).norm()
        self.moved = [(each, each.grad * (0.1 / norm)) for each in params]
        for each, by in self.moved:
            each.data.add_(by) if not clears else each.add_(by)
        if clears:
            self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for each, by in self.moved:
            each.sub_(by)
        super().step()

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
            self.climb()
            closure()
        self.descend()
        return loss


class SamWithAnOptionalClosure(Sam):
    def step(self, closure=None):
        return super().step(closure)


class SamOfTheFirstGradient(SamWithAnOptionalClosure):
    """Takes the gradients to be there, and calls the closure once."""

    def step(self, closure=None):
        self.climb()
        with torch.enable_grad():
            closure()
        self.descend()


class SamByData(SamWithAnOptionalClosure):
    """Writes to the weights as torch does not count it, and lets the closure clear gradients."""

    def step(self, closure=None):
        with torch.enable_grad():
            closure()
            self.climb(clears=False)
            closure()
        self.descend()


class Polyak(torch.optim.SGD):
    """The loss over the squared norm of its gradient is the learning rate."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        params = [each for group in self.param_groups for each in group["params"]]
        rate = loss / sum(each.grad.square().sum() for each in params)
        for each in params:
            each.sub_(each.grad * rate * 0.1)
        return loss


class Steps(Classifier):
    """Lightning's documented override."""

    optimizer_cls = torch.optim.SGD

    def configure_optimizers(self):
        return self.optimizer_cls(self.parameters(), lr=0.3)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class SkipsHighLosses(Steps):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        loss = optimizer_closure()
        if loss < 0.75:
            optimizer.step()


class AsksTwice(Steps):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        assert optimizer_closure() == optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class LeavesItToLightning(Steps):
    def optimizer_step(self, *arguments, **keywords):
        super(Classifier, self).optimizer_step(*arguments, **keywords)


class StepsByPolyak(Steps):
    optimizer_cls = Polyak


def by_lockstep(module_cls, num_shards=2, **arguments):
    made = TrainingOperator.from_lightning(module_cls, loader(GLOBAL_BATCH // num_shards))
    with TorchTrainer(training_operator_cls=made, num_shards=num_shards, **arguments) as trainer:
        for _ in range(2):
            trainer.train()
        return trainer.get_model()


@pytest.mark.parametrize("overrides", [False, True])
def test_an_optimizer_that_needs_a_closure_is_refused(overrides):
    class Module(Steps if overrides else Classifier):
        def configure_optimizers(self):
            return Sam(self.parameters(), lr=0.3)

    made = TrainingOperator.from_lightning(Module, loader())
    with pytest.raises(NotAvailableError, match="Sam needs manual optimisation") as refusal:
        TorchTrainer(training_operator_cls=made, use_local=True)
    assert "self.automatic_optimization = False" in str(refusal.value)


@pytest.mark.parametrize(
    ("optimizer", "got"),
    [
        (SamWithAnOptionalClosure, "weights or gradients were changed"),
        (SamOfTheFirstGradient, "weights or gradients were changed"),
        (SamByData, "several times in a step"),
    ],
)
def test_another_loss_is_refused(optimizer, got):
    class Module(Steps):
        optimizer_cls = optimizer

    made = TrainingOperator.from_lightning(Module, loader())
    with (
        pytest.raises(NotAvailableError, match=got) as refusal,
        TorchTrainer(training_operator_cls=made, use_local=True) as trainer,
    ):
        trainer.train()
    assert "self.automatic_optimization = False" in str(refusal.value)


@pytest.mark.parametrize(
    ("module_cls", "num_workers"),
    [
        (SkipsHighLosses, 1),
        (AsksTwice, 1),
        (LeavesItToLightning, 1),
        (StepsByPolyak, 1),
        pytest.param(SkipsHighLosses, 2, marks=pytest.mark.slow),
        pytest.param(StepsByPolyak, 2, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_that_of_all_samples(module_cls, num_workers):
    expected, _ = by_lightning(module_cls(), max_epochs=2, validates=False)
    plain, _ = by_lightning(Steps(), max_epochs=2, validates=False)
    assert farthest(by_lockstep(module_cls, num_workers=num_workers), expected) < 1e-12
    if module_cls in (SkipsHighLosses, StepsByPolyak):
        assert farthest(expected, plain) > 1e-3, "the oracle does not see the loss"


class NotesItsLosses(Steps):
    """Its weights stay as they are."""

    optimizer_cls = staticmethod(lambda parameters, lr: torch.optim.SGD(parameters, lr=0.0))

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        vars(self).setdefault("losses", []).append(optimizer.step(closure=optimizer_closure))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_a_window_is_that_of_its_samples(reduction):
    class Module(NotesItsLosses):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if reduction == "mean" else loss * len(batch[1])

    class Operator(TrainingOperator.from_lightning(Module, loader(GLOBAL_BATCH // 2))):
        loss_reduction = reduction

    with TorchTrainer(
        training_operator_cls=Operator, use_local=True, num_shards=2, accumulate=4
    ) as trainer:
        trainer.train()
        module = trainer.get_local_operator().module
    features, targets = loader().dataset.tensors
    ends = [*range(0, SAMPLES, 4 * GLOBAL_BATCH), SAMPLES]
    expected = [
        nn.functional.cross_entropy(module(features[a:b]), targets[a:b], reduction=reduction)
        for a, b in itertools.pairwise(ends)
    ]
    assert len(module.losses) == 2
    torch.testing.assert_close(
        torch.stack(module.losses), torch.stack(expected), rtol=1e-13, atol=0
    )


class StepsBySam(Steps):
    """With Lightning's wrapper around the optimizer."""

    optimizer_cls = Sam
    wraps = True

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=self.wraps)

        def closure():
            optimizer.zero_grad()
            loss = super(StepsBySam, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class AsTheRefusalSays(StepsBySam):
    optimizer_cls = SamWithAnOptionalClosure
    wraps = False


@pytest.mark.parametrize(
    ("module_cls", "num_workers"),
    [
        (StepsBySam, 1),
        (AsTheRefusalSays, 1),
        pytest.param(StepsBySam, 2, marks=pytest.mark.slow),
        pytest.param(AsTheRefusalSays, 2, marks=pytest.mark.slow),
    ],
)
def test_manual_optimisation_gives_an_optimizer_its_closure(module_cls, num_workers):
    expected, _ = by_lightning(module_cls(), max_epochs=2, validates=False)
    plain, _ = by_lightning(Steps(), max_epochs=2, validates=False)
    assert farthest(by_lockstep(module_cls, num_workers=num_workers), expected) < 1e-12
    assert farthest(expected, plain) > 1e-3, "the oracle does not see what the optimizer does"
