# SPDX-License-Identifier: Apache-2.0
"""The default loss is that of one process where the criterion's mean is over targets."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from tests.torch_versions import needs_linear_cross_entropy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError, LostUpdateError
from lockstep.keys import BATCH_SIZE

X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DENSE = torch.randn(24, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CLASSES = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1] * 3)
SOME = torch.tensor([0, 1, 0, 1, 0, -100, -100, -100, *[-100] * 4, 1, 1, 0, 0, *[0, -100] * 4])
TOKENS = torch.where(torch.arange(5) < (torch.arange(24) % 5 + 1)[:, None], CLASSES[:, None], 0)
WEIGHT = torch.tensor([1.0, 9.0], dtype=torch.float64)
OF_CLASSES = torch.stack([1 - CLASSES * 0.9, CLASSES * 0.9], dim=1).double()


class Transposed(nn.Module):
    """Scores (N, C, T) of tokens, as the criterion wants them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        scores = self.linear(x)
        return scores.transpose(1, 2) if scores.dim() == 3 else scores


class LogScores(Transposed):
    def forward(self, x):
        return super().forward(x).log_softmax(dim=1)


class Focal(nn.CrossEntropyLoss):
    """As it is widely written: a mean over samples, with the weights of classes within it."""

    def __init__(self, alpha):
        super().__init__(weight=alpha, reduction="none")
        self.reduction = "mean"

    def forward(self, scores, target):
        each = functional.cross_entropy(scores, target, weight=self.weight, reduction="none")
        return ((1 - torch.exp(-each)).square() * each).mean()


CASES = {
    "class weights": (Transposed, nn.CrossEntropyLoss(weight=WEIGHT), X, CLASSES),
    "ignored": (Transposed, nn.CrossEntropyLoss(), X, SOME),
    "bytes": (Transposed, nn.CrossEntropyLoss(weight=WEIGHT), X, CLASSES.to(torch.uint8)),
    "both, smoothed": (
        Transposed,
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
        X,
        SOME,
    ),
    "ignored tokens": (Transposed, nn.CrossEntropyLoss(ignore_index=0), DENSE, TOKENS),
    "all tokens": (Transposed, nn.CrossEntropyLoss(), DENSE, CLASSES[:, None].expand(24, 5)),
    "log scores": (LogScores, nn.NLLLoss(weight=WEIGHT), X, CLASSES),
    "a function": (Transposed, functional.cross_entropy, X, SOME),
    "a partial function": (
        Transposed,
        partial(functional.cross_entropy, weight=WEIGHT),
        X,
        CLASSES,
    ),
    "probabilities": (Transposed, nn.CrossEntropyLoss(weight=WEIGHT), X, OF_CLASSES),
    "a forward of its own": (Transposed, Focal(WEIGHT), X, CLASSES),
}


class Classes(TrainingOperator):
    def setup(self, config):
        model, criterion, x, y = CASES[config["case"]]
        torch.manual_seed(0)
        made = model().double()
        self.model, self.optimizer, self.criterion = self.register(
            models=made, optimizers=torch.optim.SGD(made.parameters(), lr=0.5), criterion=criterion
        )
        loader = DataLoader(TensorDataset(x, y), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)


class OwnLoss(Classes):
    def compute_loss(self, batch, batch_info):
        return super().compute_loss(batch, batch_info), {"first": batch[0].flatten()[0]}


def one_process(case):
    """The weights after an epoch of batches of 8, and then the loss of all samples."""
    model, criterion, x, y = CASES[case]
    torch.manual_seed(0)
    made = model().double()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    for rows in torch.arange(24).split(8):
        if (y[rows] == -100).all():
            continue
        optimizer.zero_grad()
        criterion(made(x[rows]), y[rows]).backward()
        optimizer.step()
    return made.linear.weight.detach(), criterion(made(x), y).detach()


@pytest.mark.sampled
@pytest.mark.parametrize("operator", [Classes, OwnLoss])
@pytest.mark.parametrize("case", list(CASES))
def test_shards_weigh_as_their_targets(case, operator):
    expected, loss = one_process(case)
    with TorchTrainer(
        training_operator_cls=operator, num_shards=4, config={BATCH_SIZE: 8, "case": case}
    ) as trainer:
        trained = trainer.train()
        torch.testing.assert_close(
            trainer.get_model().linear.weight.detach(), expected, rtol=1e-12, atol=1e-12
        )
        validated = trainer.validate()
    assert trained["num_samples"] == validated["num_samples"] == 24
    assert validated["val_loss"] == pytest.approx(float(loss), rel=1e-12)


def test_an_accuracy_stays_a_mean_over_samples():
    with TorchTrainer(
        training_operator_cls=Classes, num_shards=2, config={BATCH_SIZE: 8, "case": "class weights"}
    ) as trainer:
        found = trainer.validate()["val_accuracy"]
        model = trainer.get_model()
        expected = (model(X).argmax(dim=1) == CLASSES).double().mean()
    assert found == pytest.approx(float(expected))


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("case", ["ignored", "both, smoothed", "ignored tokens", "all tokens"])
def test_an_accuracy_is_over_the_targets_that_the_loss_is_over(case, num_shards):
    """A target that the criterion ignores is neither a hit nor a miss, and weighs nothing."""
    with TorchTrainer(
        training_operator_cls=Classes,
        num_shards=num_shards,
        config={BATCH_SIZE: 8, "case": case},
    ) as trainer:
        found = trainer.validate()["val_accuracy"]
        model = trainer.get_model()
    _, criterion, x, y = CASES[case]
    counted = y != criterion.ignore_index
    expected = (model(x).argmax(dim=1) == y)[counted].double().mean()
    assert found == pytest.approx(float(expected), rel=1e-12)


def test_the_windows_of_accumulation_weigh_targets():
    with TorchTrainer(
        training_operator_cls=Classes, accumulate=3, config={BATCH_SIZE: 8, "case": "ignored"}
    ) as trainer:
        trainer.train()
        found = trainer.get_model().linear.weight.detach()
    torch.manual_seed(0)
    model = Transposed().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nn.CrossEntropyLoss()(model(X), SOME).backward()
    optimizer.step()
    torch.testing.assert_close(found, model.linear.weight.detach(), rtol=1e-12, atol=1e-12)


class Summed(Classes):
    loss_reduction = "sum"


CASES["a sum"] = (Transposed, nn.CrossEntropyLoss(reduction="sum"), X, CLASSES)


@pytest.mark.parametrize(("operator", "case"), [(Classes, "a sum"), (Summed, "class weights")])
def test_a_criterion_and_an_operator_that_contradict_each_other(operator, case):
    with (
        TorchTrainer(
            training_operator_cls=operator, config={BATCH_SIZE: 8, "case": case}
        ) as trainer,
        pytest.raises(ConfigurationError, match=r"the criterion is a (sum|mean)"),
    ):
        trainer.train()


def test_a_sum_that_both_say():
    with TorchTrainer(
        training_operator_cls=Summed, num_shards=2, config={BATCH_SIZE: 24, "case": "a sum"}
    ) as trainer:
        trainer.train()
        found = trainer.get_model().linear.weight.detach()
    torch.manual_seed(0)
    model = Transposed().double()
    nn.CrossEntropyLoss(reduction="sum")(model(X), CLASSES).backward()
    expected = model.linear.weight.detach() - 0.5 * model.linear.weight.grad
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.timeout(240)
def test_a_compiled_criterion_counts_as_the_one_that_was_compiled():
    program = (
        "import torch; from lockstep.operator.criterion_targets import *;"
        "made = torch.compile(torch.nn.CrossEntropyLoss(ignore_index=0), backend='eager');"
        "assert count_targets(CriterionCall(made, torch.tensor([0, 1, 1]))) == 2"
    )  # in a process of its own: it imports the compiler
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


FOUR_AND_ONE = torch.tensor([0, 1, 1, 0, 1, -100, -100, -100])


def with_layer(**options):
    """Features of as many columns as there are classes, and the criterion that holds the layer."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    return model, nn.LinearCrossEntropyLoss(2, 2, dtype=torch.float64, **options)


class WithLayer(TrainingOperator):
    def setup(self, config):
        model, criterion = with_layer(**config["options"])
        both = [*model.parameters(), *criterion.parameters()]
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(both, lr=0.5), criterion=criterion
        )
        loader = DataLoader(TensorDataset(X[:8], FOUR_AND_ONE), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)


@needs_linear_cross_entropy
@pytest.mark.parametrize("sync", ["replicate", "ddp"])
@pytest.mark.parametrize("options", [{}, {"weight": WEIGHT}], ids=["plain", "class weights"])
def test_a_criterion_with_a_layer_weighs_as_its_targets(sync, options):
    """Under "ddp" the criterion is in a wrapper, for the gradients of its layer."""
    arguments = {"config": {BATCH_SIZE: 8, "options": options}, "num_shards": 2, "sync": sync}
    model, criterion = with_layer(**options)
    loss = criterion(model(X[:8]), FOUR_AND_ONE)
    loss.backward()
    with TorchTrainer(training_operator_cls=WithLayer, **arguments) as trainer:
        validated = trainer.validate()
        trainer.train()
        found = trainer.get_model().weight.detach()
    assert validated["val_loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert "val_accuracy" not in validated
    expected = model.weight.detach() - 0.5 * model.weight.grad
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@needs_linear_cross_entropy
def test_a_sum_in_a_wrapper_contradicts_a_mean():
    config = {BATCH_SIZE: 8, "options": {"reduction": "sum"}}
    with (
        TorchTrainer(training_operator_cls=WithLayer, sync="ddp", config=config) as trainer,
        pytest.raises(ConfigurationError, match="the criterion is a sum"),
    ):
        trainer.train()


class Frequent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(2, 3, scale_grad_by_freq=True, dtype=torch.float64)
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.words(x))


class OfWords(TrainingOperator):
    def setup(self, config):
        model = Frequent()
        self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
        )
        self.register_data(train_loader=DataLoader(TensorDataset(CLASSES, CLASSES), batch_size=8))


def test_a_gradient_that_depends_on_its_shard_is_refused_on_one_worker_too():
    with pytest.raises(LostUpdateError, match="scale_grad_by_freq"):
        TorchTrainer(training_operator_cls=OfWords, num_shards=2)
    with TorchTrainer(training_operator_cls=OfWords) as trainer:
        trainer.train(num_steps=1)
