# SPDX-License-Identifier: Apache-2.0
"""`trainer.verify` over real workers; a copy that fails on one rank leaves the run as it was."""

import logging
import os

import pytest
import torch
import torch.distributed as dist
from tests.ray.operators import (
    GLOBAL_BATCH,
    STEPS,
    DefaultLoop,
    PlainBackward,
    farthest,
    net,
    one_process,
    problem,
    sgd,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE

CONFIG = {BATCH_SIZE: GLOBAL_BATCH}


class Failing(DefaultLoop):
    """A copy fails on the last rank where the test says so; its peers wait in a collective."""

    joint_loss = True

    def setup(self, config):
        super().setup(config)
        self.is_copy = hasattr(type(self), "has_lived")
        type(self).has_lived = True
        if self.is_copy and os.environ.get("FAILS") == "in_setup" and self.world_rank == 2:
            raise ArithmeticError("as it happens")

    def compute_loss(self, batch, batch_info):
        # The default group is the one that computes: the copy's own, or one process.
        count = torch.ones(1)
        dist.all_reduce(count)
        assert count.item() == self._lockstep.context.world_size == dist.get_world_size()
        failing = os.environ.get("FAILS") if self.is_copy else None
        if failing == "in_loss" and self.world_rank == 2:
            raise ArithmeticError("as it happens")
        return super().compute_loss(batch, batch_info)


def set_failing(place):
    def on_worker():
        os.environ["FAILS"] = place

    return on_worker


@pytest.mark.slow
def test_the_run_goes_on_as_if_nothing_had_been_verified():
    with TorchTrainer(training_operator_cls=Failing, num_workers=3, config=CONFIG) as trainer:
        trainer.train(num_steps=3)
        assert trainer.verify(num_steps=3).ok
        for place in ("in_loss", "in_setup"):
            trainer.apply_all_workers(set_failing(place))
            with pytest.raises(ArithmeticError, match="as it happens") as caught:
                trainer.verify(num_steps=2)
            assert any("raised on rank 2" in note for note in caught.value.__notes__)
        trainer.train(num_steps=STEPS - 3)
        trainer.apply_all_workers(set_failing("nowhere"))
        report = trainer.verify()
        assert report.ok, str(report)
        assert "3 workers against one process: equal" in str(report)
        assert farthest(trainer.get_model(), one_process()) < 1e-12


class Wrong(PlainBackward):
    """One model as it should be; the other one's loss is a sum, and its weights drift."""

    def train_batch(self, batch, batch_info):
        features, targets = batch
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            errors = (model(features) - targets).square()
            (errors.mean() if model is self.models[0] else errors.sum()).backward()
            optimizer.step()
        with torch.no_grad():
            self.models[0].first.bias.add_(1e-3 * self.world_rank)
        return {}


def test_what_is_wrong_is_named_parameter_by_parameter():
    with TorchTrainer(training_operator_cls=Wrong, num_workers=2, config=CONFIG) as trainer:
        report = trainer.verify()
    found = {row.parameter: row.verdict for row in report.rows}
    assert "the workers' weights differ" in found.pop("models[0].first.bias")
    for name, verdict in found.items():
        if name.startswith("models[0]"):
            assert verdict == "equal", name
        else:
            assert "a loss that is a sum" in verdict, name


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


class Heard(DefaultLoop):
    warnings = Warnings()

    def setup(self, config):
        super().setup(config)
        logging.getLogger("lockstep").addHandler(self.warnings)  # once, however often it is


def test_of_a_right_program_nothing_is_said():
    with TorchTrainer(training_operator_cls=Heard, num_workers=2, config=CONFIG) as trainer:
        assert trainer.verify().ok
        trainer.train(num_steps=1)
        assert trainer.verify().ok
        assert trainer.apply_all_operators(lambda operator: operator.warnings.said) == [[], []]


@pytest.mark.parametrize("sync", ["ddp", "fsdp"])
def test_other_ways_to_synchronise_go_on_undisturbed(sync):
    with TorchTrainer(
        training_operator_cls=DefaultLoop, num_workers=2, config=CONFIG, sync=sync
    ) as trainer:
        trainer.train(num_steps=3)
        report = trainer.verify(num_steps=3)
        trainer.train(num_steps=STEPS - 3)
        assert farthest(trainer.get_model(), one_process()) < 1e-12
    assert report.ok, str(report)


class FailingInShards(DefaultLoop):
    def compute_loss(self, batch, batch_info):
        if os.environ.get("FAILS") == "in_shards" and self.world_rank == 1:
            raise ArithmeticError("as it happens")
        return super().compute_loss(batch, batch_info)


def test_a_copy_in_shards_that_fails_on_one_rank_frees_its_peers():
    """They would wait for `timeout_s`, longer than a test may take."""
    with TorchTrainer(
        training_operator_cls=FailingInShards, num_workers=2, config=CONFIG, sync="fsdp"
    ) as trainer:
        trainer.train(num_steps=2)  # the fourth batch would have one sample, for rank 0
        trainer.apply_all_workers(set_failing("in_shards"))
        with pytest.raises(ArithmeticError, match="as it happens"):
            trainer.verify()
        trainer.apply_all_workers(set_failing(""))
        trainer.train(num_steps=STEPS - 2)
        assert farthest(trainer.get_model(), one_process()) < 1e-12


class OwnWrapper(DefaultLoop):
    """Torch's DDP, put on by hand."""

    def setup(self, config):
        model = DistributedDataParallel(net())
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))


def test_a_wrapper_of_ones_own_that_weighs_uneven_ranks_alike_is_found():
    config = {BATCH_SIZE: 11}
    with TorchTrainer(
        training_operator_cls=OwnWrapper, num_workers=2, config=config, wrap_ddp=False
    ) as trainer:
        report = trainer.verify()
    # The whole batch has 11 rows, 6 and 5 on the ranks, which DDP averages as if they were equal.
    assert not any(row.ok for row in report.rows)
    assert "ranks are weighted unequally" in str(report) or "weights or a factor" in str(report)


class Contrastive(DefaultLoop):
    """A loss over the rows of all workers."""

    joint_loss = True

    def compute_loss(self, batch, batch_info):
        features, _ = batch
        embedded = self.model(features)
        return lockstep.info_nce(embedded, embedded.tanh() + features[:, :2], torch.tensor(2.0))


def test_a_loss_over_the_rows_of_all_workers():
    config = {BATCH_SIZE: 11}
    with TorchTrainer(training_operator_cls=Contrastive, num_workers=2, config=config) as trainer:
        report = trainer.verify(num_steps=4)
    assert report.ok, str(report)


class Unsynchronised(DefaultLoop):
    """wrap_ddp=False, and no wrapper of one's own either."""


@pytest.mark.slow
def test_local_gradients_are_named_and_a_rank_in_the_driver_takes_part():
    with TorchTrainer(
        training_operator_cls=Unsynchronised,
        num_workers=2,
        config=CONFIG,
        wrap_ddp=False,
        use_local=True,
    ) as trainer:
        report = trainer.verify()
        assert not dist.is_initialized() or dist.get_world_size() == 2
    assert all("differs between ranks: it is not synchronised" in r.verdict for r in report.rows)
    assert not dist.is_initialized()
