# SPDX-License-Identifier: Apache-2.0
"""N workers end where one process ends."""

import os

import pytest
import torch
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
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator, local
from lockstep.keys import BATCH_SIZE

CONFIG = {BATCH_SIZE: GLOBAL_BATCH}


class HoldsALocalParameter(TrainingOperator):
    """On each rank the local parameter has another, much larger gradient than the shared ones."""

    def setup(self, config):
        model = net()
        model.own = local(nn.Parameter(torch.zeros((), dtype=torch.float64)))
        self.own = model.own
        self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))

    def compute_loss(self, batch, batch_info):
        features, targets = batch
        own = 100.0 * (self.world_rank + 1) * self.own
        return nn.functional.mse_loss(self.model(features), targets) + own


SIZES = [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))]


@pytest.mark.parametrize("num_workers", SIZES)
def test_default_loop(num_workers):
    with TorchTrainer(
        training_operator_cls=DefaultLoop, num_workers=num_workers, config=CONFIG
    ) as trainer:
        result = trainer.train(num_steps=STEPS)
        model = trainer.get_model()
        processes = trainer.apply_all_workers(os.getpid)
    assert farthest(model, one_process()) < 1e-12
    assert len(set(processes)) == num_workers
    assert (result["batch_count"], result["epoch"]) == (STEPS, 4)
    assert result["num_samples"] == 3 * 37 + 36


@pytest.mark.parametrize("sync", ["replicate", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_local_parameter_is_no_part_of_the_norm_that_is_clipped(sync):
    with TorchTrainer(
        training_operator_cls=HoldsALocalParameter,
        num_workers=2,
        sync=sync,
        config=CONFIG,
        clip_grad_norm=0.3,
    ) as trainer:
        trainer.train(num_steps=STEPS)
        model = trainer.get_model()
        owns = trainer.apply_all_operators(lambda operator: operator.own.item())
    assert farthest(one_process(), one_process(clip=0.3)) > 1e-3, "nothing is clipped"
    del model.own
    assert farthest(model, one_process(clip=0.3)) < 1e-12
    # Nothing scales a local gradient down.
    assert max(owns) < -100


@pytest.mark.parametrize("num_workers", SIZES)
def test_plain_backward_and_custom_method_in_an_own_train_batch(num_workers):
    with TorchTrainer(
        training_operator_cls=PlainBackward, num_workers=num_workers, config=CONFIG
    ) as trainer:
        result = trainer.train(num_steps=STEPS)
        by_forward, by_method = trainer.get_model()
    assert farthest(by_forward, one_process()) < 1e-12
    assert farthest(by_method, one_process("another_way")) < 1e-12
    assert result["num_samples"] == 3 * 37 + 36


@pytest.mark.slow
def test_more_shards_than_workers():
    with TorchTrainer(
        training_operator_cls=DefaultLoop, num_workers=2, num_shards=5, config=CONFIG
    ) as trainer:
        trainer.train(num_steps=STEPS)
        assert farthest(trainer.get_model(), one_process()) < 1e-12
