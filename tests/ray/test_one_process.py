# SPDX-License-Identifier: Apache-2.0
"""N workers end where one process ends."""

import os

import pytest
from tests.ray.operators import (
    GLOBAL_BATCH,
    STEPS,
    DefaultLoop,
    PlainBackward,
    farthest,
    one_process,
)

from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE

CONFIG = {BATCH_SIZE: GLOBAL_BATCH}


SIZES = [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3)), 4]


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
