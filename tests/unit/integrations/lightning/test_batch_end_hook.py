# SPDX-License-Identifier: Apache-2.0
"""What on_train_batch_end writes to weights happens once in a batch, as with Lightning."""

import copy

import pytest
import torch
from tests.unit.integrations.lightning.modules import (
    GLOBAL_BATCH,
    Classifier,
    by_lightning,
    farthest,
    problem,
)
from tests.unit.integrations.lightning.two_threads import on_two_threads
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, Subset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import LostUpdateError
from lockstep.worker import LoopRequest

pytestmark = pytest.mark.filterwarnings(
    # Lightning's advice on loader workers and logging intervals, and its use of older torch.
    "ignore::UserWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)

SAMPLES, EPOCHS = 2 * GLOBAL_BATCH + 1, 2
"""An epoch's last batch has one sample, which is the first shard's."""


def rows(batch_size=GLOBAL_BATCH):
    return DataLoader(Subset(problem(), range(SAMPLES)), batch_size)


class FollowsInTheEnd(Classifier):
    """The loss draws the layers to a target, which follows them."""

    def __init__(self, width=7, lr=0.3):
        super().__init__(width, lr)
        self.target = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + (self(batch[0]) - self.target(batch[0])).square().mean()

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for mine, its in zip(self.layers.parameters(), self.target.parameters(), strict=True):
            self.follow(its, mine)

    def follow(self, its, mine):
        its.lerp_(mine, 0.3)


class Assigns(FollowsInTheEnd):
    def follow(self, its, mine):
        its.data = its.data * 0.7 + mine.data * 0.3


class WritesToData(FollowsInTheEnd):
    """Raises no version counter."""

    def follow(self, its, mine):
        its.data.copy_(its.data * 0.7 + mine.data * 0.3)


class Shares(FollowsInTheEnd):
    """From the first batch on both are one memory."""

    def follow(self, its, mine):
        its.data = mine.data


class CopiesLate(FollowsInTheEnd):
    """When nobody keeps copies of all weights any more."""

    def follow(self, its, mine):
        if self.global_step > 4:
            its.copy_(mine)


class Averages(FollowsInTheEnd):
    """The average counts its updates in a buffer."""

    def __init__(self, width=7, lr=0.3):
        super().__init__(width, lr)
        follow = get_ema_multi_avg_fn(0.9)
        self.average = AveragedModel(self.layers, multi_avg_fn=follow).requires_grad_(False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.average.update_parameters(self.layers)


def by_one_process(module_cls):
    module, _ = by_lightning(module_cls(), max_epochs=EPOCHS, validates=False, train=rows())
    return module


@pytest.mark.parametrize("module_cls", [FollowsInTheEnd, Assigns, WritesToData])
def test_a_worker_without_samples_writes_too(module_cls):
    def body(worker):
        for _ in range(EPOCHS):
            worker.train(LoopRequest("train", None, False, {}))
        return worker.operator.module

    operator = TrainingOperator.from_lightning(module_cls, rows(GLOBAL_BATCH // 2))
    first, second = on_two_threads(operator, body)
    assert farthest(first, second) == 0
    assert farthest(first, by_one_process(module_cls)) < 1e-12


class Stream(IterableDataset):
    """Whose end no rank knows before it has come to it."""

    def __iter__(self):
        yield from Subset(problem(), range(SAMPLES))


def test_a_worker_without_samples_has_what_was_written_when_a_call_ends_with_the_epochs_last_step():
    """The epoch's end is known to the next call alone."""

    def body(worker):
        for _ in range(EPOCHS):
            worker.train(LoopRequest("train", -(-SAMPLES // GLOBAL_BATCH), False, {}))
        return worker.operator.module

    stream = DataLoader(Stream(), GLOBAL_BATCH // 2)
    first, second = on_two_threads(TrainingOperator.from_lightning(FollowsInTheEnd, stream), body)
    assert farthest(first, second) == 0
    assert farthest(first, by_one_process(FollowsInTheEnd)) < 1e-12


def trainer_of(module_cls, num_shards):
    operator = TrainingOperator.from_lightning(module_cls, rows(GLOBAL_BATCH // num_shards))
    return TorchTrainer(training_operator_cls=operator, num_shards=num_shards)


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize(
    "module_cls", [FollowsInTheEnd, Assigns, WritesToData, Shares, CopiesLate, Averages]
)
def test_it_happens_once_for_all_shards_of_a_worker(module_cls, num_shards):
    with trainer_of(module_cls, num_shards) as trainer:
        for _ in range(EPOCHS):
            trainer.train()
        trained = trainer.get_model()
    expected = by_one_process(module_cls)
    assert farthest(trained, expected) < 1e-12
    buffers = zip(trained.buffers(), expected.buffers(), strict=True)
    assert all(torch.equal(one, other) for one, other in buffers)


class WritesOfItsSamples(FollowsInTheEnd):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.target[0].bias.fill_(batch[0].mean())


class MovesLate(FollowsInTheEnd):
    def follow(self, its, mine):
        if self.global_step > 4:
            its.lerp_(mine, 0.3)


@pytest.mark.parametrize(
    ("module_cls", "named"), [(WritesOfItsSamples, "bias"), (MovesLate, "weight")]
)
def test_what_shards_would_write_differently_is_refused(module_cls, named):
    with (
        trainer_of(module_cls, 2) as trainer,
        pytest.raises(LostUpdateError, match=rf"(?s)on_train_batch_end.*`target\.0\.{named}`"),
    ):
        for _ in range(EPOCHS):
            trainer.train()
    with trainer_of(module_cls, 1) as trainer:
        for _ in range(EPOCHS):
            trainer.train()


class RaisesOnce(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 2 and not getattr(self, "has_raised", False):
            self.has_raised = True
            raise LookupError("no such metric")


def test_a_step_behind_which_the_hook_fails_counts(caplog):
    with trainer_of(RaisesOnce, 1) as trainer:
        with pytest.raises(LookupError):
            trainer.train()
        assert trainer.status()["step"] == 2
        assert "step 1 counts: its optimizers had stepped when the loop failed" in caplog.text
        for _ in range(EPOCHS):
            trainer.train()
        trained = trainer.get_model()
    assert farthest(trained, by_one_process(Classifier)) < 1e-12
