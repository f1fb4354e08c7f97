# SPDX-License-Identifier: Apache-2.0
"""sync="data_parallel": one process, several replicas, and one process's result."""

import os

import pytest
import torch
from tests.ray.operators import (
    GLOBAL_BATCH,
    SAMPLES,
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
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError, LostUpdateError
from lockstep.keys import BATCH_SIZE
from lockstep.sync import DataParallelModel

CONFIG = {BATCH_SIZE: GLOBAL_BATCH}


def start(operator=DefaultLoop, num_workers=3, config=CONFIG, **options):
    return TorchTrainer(
        training_operator_cls=operator,
        num_workers=num_workers,
        config=config,
        sync="data_parallel",
        **options,
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_the_default_loop(num_workers, tmp_path):
    threads = torch.get_num_threads()
    with start(num_workers=num_workers) as trainer:
        assert torch.get_num_threads() == threads
        result = trainer.train(num_steps=STEPS - 4)
        path = trainer.save(tmp_path / "state")
        report = trainer.verify(num_steps=2)
        assert report.ok
        assert report.world_size == num_workers
        trainer.train(num_steps=2)
        trainer.load(path)
        trainer.train(num_steps=4)
        model = trainer.get_model()
        assert trainer.apply_all_workers(os.getpid) == [os.getpid()]
        assert trainer.validate()["num_samples"] == SAMPLES
        state = trainer.state_dict()
    assert farthest(model, one_process()) < 1e-12
    assert type(model) is type(net())
    assert result["batch_count"] == STEPS - 4
    assert state["num_shards"] == num_workers
    assert [*state["models"][0]] == [*net().state_dict()]


@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_loop_of_ones_own_and_a_method_of_the_model(num_workers):
    with start(PlainBackward, num_workers=num_workers) as trainer:
        trainer.train(num_steps=STEPS)
        by_forward, by_method = trainer.get_model()
    assert farthest(by_forward, one_process()) < 1e-12
    assert farthest(by_method, one_process("another_way")) < 1e-12


class Seen(DefaultLoop):
    """Keeps what it was called with."""

    def compute_loss(self, batch, batch_info):
        self.sizes = [*getattr(self, "sizes", []), len(batch[0])]
        return super().compute_loss(batch, batch_info)


def test_the_loss_is_computed_once_for_the_whole_batch():
    with start(Seen, num_workers=2, num_shards=5) as trainer:
        trainer.train()
        assert trainer.get_local_operator().sizes == [12, 12, 12, 1]
        assert type(trainer.get_local_operator().model) is DataParallelModel
        assert trainer.get_local_operator().world_rank == 0


def test_a_loaders_batch_size_is_per_shard():
    class Plain(Seen):
        def setup(self, config):
            super().setup({BATCH_SIZE: 4})

    with start(Plain, config={}) as trainer:
        trainer.train(num_steps=2)
        assert trainer.get_local_operator().sizes == [12, 12]


@pytest.mark.parametrize("sync", ["data_parallel", "parameter_server"])
def test_accumulation_and_clipping(sync):
    features, targets = problem()
    model = net()
    optimizer = sgd(model)
    for window in ([slice(0, 12), slice(12, 24)], [slice(24, 36), slice(36, 37)]):
        optimizer.zero_grad()
        total = sum(len(features[rows]) for rows in window)
        for rows in window:
            loss = nn.functional.mse_loss(model(features[rows]), targets[rows])
            (loss * (len(features[rows]) / total)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    workers = {"data_parallel": 3, "parameter_server": 1}[sync]
    with TorchTrainer(
        training_operator_cls=DefaultLoop,
        config=CONFIG,
        num_workers=workers,
        sync=sync,
        accumulate=2,
        clip_grad_norm=0.05,
    ) as trainer:
        trainer.train()
        assert farthest(trainer.get_model(), model) < 1e-12


def test_objects_handed_in_hold_the_trained_weights():
    model = net()
    optimizer = sgd(model)
    loader = DataLoader(TensorDataset(*problem()), GLOBAL_BATCH // 2)
    operator = TrainingOperator.from_model(
        model, optimizer=optimizer, criterion=nn.MSELoss(), train_loader=loader
    )
    with start(operator, num_workers=2) as trainer:
        trainer.train(num_steps=STEPS)
        assert farthest(model, one_process()) < 1e-12
        assert len(optimizer.state) == 4
        assert type(trainer.get_local_operator().model) is DataParallelModel


class Writing(DefaultLoop):
    def setup(self, config):
        super().setup(config)
        self.model.module.register_forward_pre_hook(_write)


def _write(module, inputs):
    module.first.bias.data.add_(inputs[0].mean())


def test_a_lost_write_ends_the_run_before_its_step():
    trainer = start(Writing)
    with pytest.raises(LostUpdateError, match="replica 1"):
        trainer.train()
    trainer.shutdown()


@pytest.mark.parametrize("sync", ["data_parallel", "parameter_server"])
@pytest.mark.parametrize("option", [{"reproducible": True}, {"wrap_ddp": False}], ids=str)
def test_what_only_replicate_can_do(sync, option):
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        TorchTrainer(training_operator_cls=DefaultLoop, config=CONFIG, sync=sync, **option)


def test_verify_names_layers_as_the_model_does_without_its_wrapper():
    class Dropping(TrainingOperator):
        def setup(self, config):
            model = nn.Sequential(net(), nn.Dropout(0.5))
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=sgd(model), criterion=nn.MSELoss()
            )
            data = TensorDataset(*problem())
            self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE]))

    with start(Dropping, num_workers=2) as trainer:
        report = trainer.verify()
    assert list(report.notes) == ["dropout is off in layer `1`"]
