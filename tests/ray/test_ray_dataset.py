# SPDX-License-Identifier: Apache-2.0
"""Ray datasets: every row once an epoch, each with the weight that it has in one process."""

import logging
import os
import signal
import time
from collections import defaultdict
from contextlib import contextmanager
from itertools import chain

import numpy as np
import pandas
import pytest
import ray.data
import torch
from tests.ray.surviving import until_complete
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.data import RayBatches
from lockstep.errors import (
    CheckpointError,
    ConfigurationError,
    NotEnoughResourcesError,
    NotShardableError,
    WrongTypeError,
)
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike, struck
from lockstep.trainer.logged_run import LoggedRun

pytestmark = pytest.mark.filterwarnings(
    # What Ray Data says to itself about its own settings.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning",
)

ROWS = 53
CONFIG = {BATCH_SIZE: 10}


def dataset(blocks=(1, 30, 2, 20)):
    """Blocks of very different size: Ray hands out whole ones."""
    stops = np.cumsum(blocks)
    tables = []
    for start, stop in zip([0, *stops[:-1]], stops, strict=True):
        ids = np.arange(start, stop)
        tables.append(pandas.DataFrame({"id": ids, "x": ids / 50, "y": ids**2 / 1e3}))
    return ray.data.from_pandas(tables)


def model():
    layer = nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.fill_(0.5)
        layer.bias.zero_()
    return layer


def loss_of(layer, batch):
    rows = torch.stack([batch["x"], batch["y"]], dim=1)
    return (layer(rows).squeeze(1) - 1).square().mean()


class Regression(TrainingOperator):
    def setup(self, config):
        self.model = model()
        self.register(
            models=self.model,
            optimizers=torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5),
        )
        self.seen = []

    def compute_loss(self, batch, batch_info):
        self.seen.append((batch_info["global_step"], batch["id"].tolist()))
        return loss_of(self.model, batch), {"mean_id": batch["id"].double().mean()}


class OwnStep(Regression):
    """A loop that takes plain batches, and so has to borrow one where it has no rows."""

    def train_batch(self, batch, batch_info):
        weight = self._lockstep.global_batch.joint_batch.num_samples
        if weight:
            self.seen.append((batch_info["global_step"], batch["id"].tolist()))
        self._lockstep.registered.optimizers[0].zero_grad()
        loss = loss_of(self.model, batch)
        loss.backward()
        self._lockstep.registered.optimizers[0].step()
        return {"train_loss": loss.item()}


def steps_of(trainer):
    """The rows of each global batch, whoever had them."""
    steps = defaultdict(list)
    for worker in trainer.apply_all_operators(lambda operator: operator.seen):
        for step, ids in worker:
            steps[step] += ids
    return [steps[step] for step in sorted(steps)]


def by_one_process(steps):
    """The same global batches by plain autograd."""
    layer = model()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.5)
    for ids in steps:
        number = torch.tensor(ids, dtype=torch.float64)
        optimizer.zero_grad()
        loss_of(layer, {"x": number / 50, "y": number**2 / 1e3}).backward()
        optimizer.step()
    return layer


@pytest.mark.slow
def test_the_log_of_a_run_says_which_steps_cannot_be_replayed(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, "lockstep.run_log"),
        TorchTrainer(
            training_operator_cls=Regression, config=CONFIG, checkpoint_dir=tmp_path
        ) as trainer,
    ):
        trainer.train(dataset=dataset())
    assert LoggedRun.read(tmp_path).changes == [(0, "train(dataset=...)")]
    assert "the steps after 0 are on a Ray dataset, and cannot be replayed" in caplog.text


def is_trained_by(trainer, steps):
    pairs = zip(trainer.get_model().parameters(), by_one_process(steps).parameters(), strict=True)
    return all((a - b).abs().max() < 1e-12 for a, b in pairs)


def test_every_row_once_an_epoch_with_its_weight():
    rows = dataset()
    with TorchTrainer(training_operator_cls=Regression, num_workers=2, config=CONFIG) as trainer:
        result = trainer.train(dataset=rows)
        first = steps_of(trainer)
        again = trainer.train(dataset=rows)
        steps = steps_of(trainer)
        assert is_trained_by(trainer, steps)
    assert sorted(chain.from_iterable(first)) == list(range(ROWS))
    assert sorted(chain.from_iterable(steps[len(first) :])) == list(range(ROWS))
    assert (result["num_samples"], result["epoch"], again["epoch"]) == (ROWS, 1, 2)
    assert result["batch_count"] == len(first)
    assert result["mean_id"] == pytest.approx((ROWS - 1) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [Regression, OwnStep])
@pytest.mark.parametrize(("num_workers", "num_shards"), [(1, 1), (2, 2), (2, 3), (3, 3)])
def test_calls_go_on_where_the_last_one_stopped(operator, num_workers, num_shards):
    rows = dataset((9, 9, 9, 9, 9, 8))
    with TorchTrainer(
        training_operator_cls=operator,
        num_workers=num_workers,
        num_shards=num_shards,
        config=CONFIG,
    ) as trainer:
        counts = [trainer.train(dataset=rows, num_steps=n)["batch_count"] for n in (1, 2, 4)]
        result = trainer.train(dataset=rows)
        steps = steps_of(trainer)
        assert is_trained_by(trainer, steps)
    assert counts == [1, 2, 4]
    epochs = result["epoch"]
    assert sorted(chain.from_iterable(steps)) == sorted(list(range(ROWS)) * epochs)


@pytest.mark.slow
def test_a_pass_that_was_left_is_read_anew(tmp_path):
    """The weaker promise: after a load no row is left out, and some are seen again."""
    with TorchTrainer(training_operator_cls=Regression, num_workers=2, config=CONFIG) as trainer:
        rows = dataset((10, 10, 10, 10, 13))
        trainer.train(dataset=rows)
        trainer.train(dataset=rows, num_steps=2)
        path = trainer.save(tmp_path / "middle")
    with TorchTrainer(training_operator_cls=Regression, num_workers=2, config=CONFIG) as trainer:
        trainer.load(path)
        assert trainer.train(dataset=dataset())["epoch"] == 2
        steps = steps_of(trainer)
    assert sorted(chain.from_iterable(steps)) == list(range(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_after_an_exception_the_rows_are_read_anew(num_workers):
    """No worker but the one that raised knows which rows it had; no step is lost with them."""
    failing = struck(Regression, Strike("raise", num_workers - 1, 2, "backward"))
    rows = dataset((10, 10, 10, 10, 13))
    with TorchTrainer(
        training_operator_cls=failing, num_workers=num_workers, config=CONFIG
    ) as trainer:
        with pytest.raises(RuntimeError, match="struck"):
            trainer.train(dataset=rows)
        assert trainer.status()["step"] == 2
        first = steps_of(trainer)[:2]
        trainer.apply_all_operators(lambda operator: operator.seen.clear())
        assert trainer.train(dataset=rows)["num_samples"] == ROWS
        steps = steps_of(trainer)
        assert is_trained_by(trainer, [*first, *steps])
    assert sorted(chain.from_iterable(steps)) == list(range(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_epochs_are_counted_on_after_a_pass_that_failed(num_workers):
    failing = struck(Regression, Strike("raise", num_workers - 1, 8, "backward"))
    rows = dataset((10, 10, 10, 10, 13))
    with TorchTrainer(
        training_operator_cls=failing, num_workers=num_workers, config=CONFIG
    ) as trainer:
        steps = trainer.train(dataset=rows)["batch_count"]
        assert steps <= 8
        with pytest.raises(RuntimeError, match="struck"):
            trainer.train(dataset=rows)
        counted = trainer.status()
        assert (counted["step"], counted["epochs_finished"]) == (8, 1)
        assert trainer.state_dict()["epoch"] == 1
        result = trainer.train(dataset=rows)
        assert (result["num_samples"], result["epoch"]) == (ROWS, 2)
        assert trainer.status()["epochs_finished"] == 2


@pytest.mark.slow
def test_a_state_that_is_refused_leaves_the_pass_where_it_is():
    rows = dataset((9, 9, 9, 9, 9, 8))
    with TorchTrainer(training_operator_cls=Regression, num_workers=2, config=CONFIG) as trainer:
        trainer.train(dataset=rows)
        trainer.train(dataset=rows, num_steps=2)
        state = trainer.state_dict()
        with pytest.raises(CheckpointError):
            trainer.load_state_dict({**state, "models": [nn.Linear(3, 4).state_dict()]})
        assert trainer.train(dataset=rows)["epoch"] == 2
        steps = steps_of(trainer)
    assert sorted(chain.from_iterable(steps)) == sorted(2 * list(range(ROWS)))


class WithALoader(Regression):
    def setup(self, config):
        super().setup(config)
        ids = torch.arange(7)
        self.register_data(train_loader=DataLoader(TensorDataset(ids), batch_size=2))

    def compute_loss(self, batch, batch_info):
        if not isinstance(batch, dict):
            ids = batch[0].double()
            batch = {"id": batch[0], "x": ids / 50, "y": ids**2 / 1e3}
        return super().compute_loss(batch, batch_info)


@pytest.mark.slow
def test_a_dataset_between_two_passes_over_the_loader():
    collated = RayBatches(
        dataset((3, 3)),
        batch_size=4,
        collate_fn=lambda columns: {k: torch.as_tensor(v) for k, v in columns.items()},
        local_shuffle_buffer_size=4,
    )
    with TorchTrainer(training_operator_cls=WithALoader, num_workers=2) as trainer:
        samples = [
            trainer.train()["num_samples"],
            trainer.train(dataset=collated)["num_samples"],
            trainer.train()["num_samples"],
        ]
        assert trainer.verify().ok
        assert is_trained_by(trainer, steps_of(trainer))
    assert samples == [7, 6, 7]


class Sequences(Regression):
    """Gets each row as a sequence of its own, of as many steps as its number says."""

    def compute_loss(self, batch, batch_info):
        rows = torch.stack([sequence[0] for sequence in batch])
        self.seen.append((batch_info["global_step"], rows[:, 0].long().tolist()))
        return (self.model(rows[:, 1:]).squeeze(1) - 1).square().mean()


def without_middle(columns):
    """The rows before 8 and from 45 on: of whole global batches nothing is left."""
    kept = (columns["id"] < 8) | (columns["id"] >= 45)
    return {name: torch.as_tensor(column[kept]) for name, column in columns.items()}


def as_sequences(columns):
    rows = torch.stack([torch.as_tensor(columns[n]).double() for n in ("id", "x", "y")], dim=1)
    return [row.expand(2 + int(row[0]) % 3, 3) for row in rows]


@pytest.mark.slow
def test_a_row_that_is_collated_to_a_sequence_has_the_weight_of_a_row():
    """Each batch weighed the steps of its first sequence."""
    rows = RayBatches(dataset((9, 30, 3, 11)), batch_size=10, collate_fn=as_sequences)
    with TorchTrainer(training_operator_cls=Sequences, num_workers=2) as trainer:
        result = trainer.train(dataset=rows)
        steps = steps_of(trainer)
        assert is_trained_by(trainer, steps)
    assert result["num_samples"] == ROWS
    assert sorted(chain.from_iterable(steps)) == list(range(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_pass_goes_on_behind_batches_that_a_collate_fn_has_emptied(num_workers):
    """It ended there, and left the rest out."""
    rows = RayBatches(dataset((53,)), batch_size=4, collate_fn=without_middle)
    with TorchTrainer(training_operator_cls=Regression, num_workers=num_workers) as trainer:
        trainer.train(dataset=rows)
        steps = steps_of(trainer)
        assert is_trained_by(trainer, steps)
    assert sorted(chain.from_iterable(steps)) == [*range(8), *range(45, ROWS)]


@pytest.mark.slow
def test_no_window_reaches_from_one_source_of_batches_into_another():
    rows = RayBatches(dataset((3, 3)), batch_size=2)

    def weight(trainer):
        return trainer.get_model().weight.clone()

    with TorchTrainer(training_operator_cls=WithALoader, num_workers=2, accumulate=4) as trainer:
        before = weight(trainer)
        # A pass over a dataset is not gone on with: its last window ends with it.
        trainer.train(dataset=rows, num_steps=1)
        of_one = weight(trainer)
        assert not torch.equal(of_one, before)
        trainer.train(num_steps=1)
        assert torch.equal(weight(trainer), of_one)
        with pytest.raises(ConfigurationError, match="1 batches without a step"):
            trainer.train(dataset=rows)
        trainer.train()
        assert trainer.train(dataset=rows)["num_samples"] == 6


@pytest.mark.slow
def test_passes_over_the_loader_and_over_a_dataset_are_counted_apart(tmp_path):
    """By a process that goes on from a checkpoint as well."""
    rows = RayBatches(dataset((3, 3)), batch_size=4)

    def passes(trainer):
        return [trainer.train()["epoch"], *(trainer.train(dataset=rows)["epoch"] for _ in "ab")]

    with TorchTrainer(training_operator_cls=WithALoader, num_workers=2) as trainer:
        assert passes(trainer) == [1, 1, 2]
        path = trainer.save(tmp_path / "saved")
    with TorchTrainer(training_operator_cls=WithALoader, num_workers=2) as trainer:
        trainer.load(path)
        assert passes(trainer) == [2, 3, 4]


@pytest.mark.slow
def test_what_is_refused():
    rows = dataset()
    with TorchTrainer(training_operator_cls=Regression, num_workers=2) as trainer:
        with pytest.raises(ConfigurationError, match="BATCH_SIZE: 64"):
            trainer.train(dataset=rows)
        with pytest.raises(ConfigurationError, match="2 or more"):
            trainer.train(dataset=RayBatches(rows, batch_size=1))
        with pytest.raises(WrongTypeError, match="register a loader"):
            trainer.train(dataset=[1, 2])
        with pytest.raises(ConfigurationError, match="train loader"):
            trainer.train()
        assert trainer.train(dataset=RayBatches(rows, batch_size=20))["num_samples"] == ROWS
    with (
        TorchTrainer(
            training_operator_cls=Regression, num_workers=2, config=CONFIG, reproducible=True
        ) as trainer,
        pytest.raises(ConfigurationError, match="reproducible"),
    ):
        trainer.train(dataset=rows)


@pytest.mark.slow
def test_no_cpu_left_is_an_error_and_no_hang():
    rows = dataset()  # a task of Ray's as well
    with (
        TorchTrainer(training_operator_cls=Regression, num_workers=4, config=CONFIG) as trainer,
        pytest.raises(NotEnoughResourcesError, match="no CPU is left"),
    ):
        trainer.train(dataset=rows)


@pytest.mark.slow
def test_a_worker_without_a_row_cannot_keep_step():
    with (
        TorchTrainer(training_operator_cls=OwnStep, num_workers=2, config=CONFIG) as trainer,
        pytest.raises(NotShardableError, match="repartition"),
    ):
        trainer.train(dataset=dataset((3,)))
    with TorchTrainer(training_operator_cls=Regression, num_workers=2, config=CONFIG) as trainer:
        assert trainer.train(dataset=dataset((3,)))["num_samples"] == 3


class Replaced(WithALoader):
    """A replacement for a lost worker is not ready before the file ``config["held"]`` is gone."""

    def setup(self, config):
        is_spare = self._lockstep.context.is_spare
        while is_spare and config["held"].exists():
            time.sleep(0.02)
        super().setup(config)
        if is_spare:
            config["held"].with_name("ready").touch()

    def compute_loss(self, batch, batch_info):
        if batch_info.get("lets_in"):
            self.config["held"].unlink(missing_ok=True)
            while not self.config["held"].with_name("ready").exists():
                time.sleep(0.02)
            time.sleep(0.2)  # in a step as slow as this one the driver sees who could join
        return super().compute_loss(batch, batch_info)


@pytest.fixture
def held(tmp_path):
    file = tmp_path / "held"
    file.touch()
    yield file
    file.unlink(missing_ok=True)


@contextmanager
def with_one_worker_left(held):
    """A trainer of two workers, which trained on a dataset before one of them was killed."""
    config = {BATCH_SIZE: 4, "held": held}
    with TorchTrainer(training_operator_cls=Replaced, num_workers=2, config=config) as trainer:
        assert trainer.train(dataset=dataset((6, 6)))["num_samples"] == 12
        os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
        yield trainer


def rows_of_a_pass(trainer, **arguments):
    """The rows that all workers see in a pass over the dataset, in order."""
    trainer.apply_all_operators(lambda operator: operator.seen.clear())
    assert trainer.train(dataset=dataset(), **arguments)["num_samples"] == ROWS
    return sorted(chain.from_iterable(steps_of(trainer)))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_known", [True, False])
def test_workers_that_are_left_read_all_rows(held, is_known):
    """Also where the driver has not heard of the death before the dataset is split."""
    with with_one_worker_left(held) as trainer:
        if is_known:
            assert len(trainer.apply_all_workers(os.getpid)) == 1
        assert trainer.train(dataset=dataset())["num_samples"] == ROWS
        assert trainer.status()["workers"] == 1
        held.unlink()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_replacement_joins_between_two_passes_over_a_dataset(held):
    """In the middle of one it would train on its own loader: it has no stream of the dataset."""
    with with_one_worker_left(held) as trainer:
        assert rows_of_a_pass(trainer, info={"lets_in": True}) == list(range(ROWS))
        assert trainer.status()["workers"] == 1
        until_complete(trainer, 2)
        assert rows_of_a_pass(trainer) == list(range(ROWS))
        assert trainer.status()["workers"] == 2
