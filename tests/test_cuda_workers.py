# SPDX-License-Identifier: Apache-2.0
"""Ray's workers on one CUDA device, which they share over gloo: bits, deaths, steps once more.

NCCL wants a device for each rank. The streams, kernels and random numbers are those of a GPU.
"""

import logging
import os
from functools import cache, partial

import pytest
import torch
from tests.ray.surviving import GLOBAL_BATCH, STEPS_IN_EPOCH, Classifier, digest
from tests.ray.surviving_in_shards import kill

import ray
from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Flip, flipped, struck
from lockstep.trainer.step_replay import replay_run

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module", autouse=True)
def _one_device_for_everybody():
    """Ray counts five GPUs, and hides none: each worker sees the one that there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        ray.init(
            num_cpus=max(8, os.cpu_count() or 1),
            num_gpus=5,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
        yield
        ray.shutdown()


def trainer_of(operator_cls=Classifier, *, num_workers, **arguments):
    return TorchTrainer(
        training_operator_cls=operator_cls,
        config={BATCH_SIZE: GLOBAL_BATCH},
        num_workers=num_workers,
        num_shards=4,
        use_gpu=True,
        backend="gloo",
        scheduler_step_freq="batch",
        **arguments,
    )


@cache
def undisturbed(num_workers, precision="fp32"):
    with trainer_of(num_workers=num_workers, precision=precision, reproducible=True) as trainer:
        assert trainer.apply_all_operators(_device) == ["cuda:0"] * num_workers
        trainer.train()
        trainer.train()
        return digest(trainer)


def _device(operator):
    return str(next(operator.model.parameters()).device)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_the_same_bits_at_any_number_of_workers(num_workers, precision):
    assert undisturbed(num_workers, precision) == undisturbed(1, precision)


@pytest.mark.parametrize("phase", ["forward", "backward", "buckets", "optimizer"])
def test_workers_that_die_change_no_bit(phase):
    expected = undisturbed(3)
    operator_cls = struck(Classifier, kill(1, 3, phase), kill(0, 9, phase))
    with trainer_of(operator_cls, num_workers=3, spare_workers=1, reproducible=True) as trainer:
        trainer.train()
        trainer.train()
        assert len(trainer.status()["recoveries"]) == 2
        assert digest(trainer) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_workers_have_equal_bits_and_a_flipped_one_is_seen(precision):
    expected, step = undisturbed(3, precision), 5  # shard 1 of 4, which rank 1 has
    flip = Flip("gradient", rank=1, step=step, position=0.3, bit=3)
    with trainer_of(
        flipped(Classifier, flip),
        num_workers=3,
        precision=precision,
        reproducible=True,
        shadow_every=1,
    ) as trainer:
        trainer.train()
        trainer.train()
        found = trainer.status()["shadow"]
        assert digest(trainer) == expected
    assert found["checked"] == 2 * STEPS_IN_EPOCH
    (wrong,) = found["wrong"]
    assert (wrong["step"], wrong["shard"], wrong["device"]) == (step + 1, 1, "cuda:0")
    assert wrong["worker"].startswith("rank 1 ")


def test_a_step_once_more_has_its_bits(tmp_path):
    folder = tmp_path / "run"
    operator_cls = struck(Classifier, kill(1, 5))
    with trainer_of(
        operator_cls,
        num_workers=3,
        spare_workers=1,
        reproducible=True,
        checkpoint_dir=folder,
        checkpoint_every=4,
    ) as trainer:
        trainer.train()
    make_trainer = partial(TorchTrainer, training_operator_cls=Classifier)
    for step in range(1, STEPS_IN_EPOCH + 1):
        report = replay_run(make_trainer, folder=folder, step=step)
        assert report.same_bits, str(report)
