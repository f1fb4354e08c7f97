# SPDX-License-Identifier: Apache-2.0
"""Rank 0 in the driver's process: it is the user's process, and it must not wait for the dead."""

import os
import sys
import time

import pytest
import torch.distributed as dist
from tests.ray.operators import GLOBAL_BATCH, STEPS, DefaultLoop, farthest, one_process

import ray
from lockstep import TorchTrainer
from lockstep.errors import WorkerDiedError, WrongUseError
from lockstep.keys import BATCH_SIZE

pytestmark = pytest.mark.other_workers


def start(**arguments):
    return TorchTrainer(
        training_operator_cls=DefaultLoop,
        num_workers=2,
        use_local=True,
        config={BATCH_SIZE: GLOBAL_BATCH},
        **arguments,
    )


def is_remote():
    return ray.get_runtime_context().get_actor_id() is not None


def raise_remotely():
    if is_remote():
        raise LookupError("the hook failed")


def die_remotely():
    if is_remote():
        os._exit(3)


@pytest.mark.parametrize(
    ("hook", "expected"), [(raise_remotely, LookupError), (die_remotely, WorkerDiedError)]
)
def test_a_rank_that_fails_before_it_came_frees_the_local_one(hook, expected):
    begin = time.monotonic()
    with pytest.raises(expected):
        start(initialization_hook=hook)
    assert time.monotonic() - begin < 40  # and not the 1800 s that a meeting may take
    assert not dist.is_initialized()


@pytest.mark.slow
def test_two_trainers_with_a_local_rank_each():
    with start() as one, start() as other:
        one.train(num_steps=STEPS)
        other.train(num_steps=STEPS)
        assert farthest(one.get_model(), one_process()) < 1e-12
        assert farthest(other.get_model(), one_process()) < 1e-12


def test_a_default_group_of_the_users_is_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mine = dist.group.WORLD
        with start() as trainer:
            trainer.train(num_steps=STEPS)
            assert farthest(trainer.get_model(), one_process()) < 1e-12
        assert dist.group.WORLD is mine
    finally:
        dist.destroy_process_group()


def test_later_tracebacks_of_the_driver_carry_no_rank():
    before = sys.excepthook
    with start():
        pass
    assert sys.excepthook is before


def form_a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.slow
def test_a_default_group_that_a_hook_formed_is_refused():
    with pytest.raises(WrongUseError, match="default process group already"):
        TorchTrainer(
            training_operator_cls=DefaultLoop,
            num_workers=2,
            config={BATCH_SIZE: GLOBAL_BATCH},
            initialization_hook=form_a_group,
        )
