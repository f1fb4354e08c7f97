# SPDX-License-Identifier: Apache-2.0
"""Workers that were started before their trainer."""

import os
import random
import signal

import pytest
import torch
from tests.ray.operators import DefaultLoop, farthest, one_process

import lockstep
import ray
from lockstep import TorchTrainer
from lockstep.engine import actor_pool
from lockstep.errors import NotEnoughResourcesError
from lockstep.keys import BATCH_SIZE


def start(num_workers):
    return TorchTrainer(
        training_operator_cls=DefaultLoop, num_workers=num_workers, config={BATCH_SIZE: 12}
    )


@pytest.mark.slow
@pytest.mark.usefixtures("workers_end_with_their_trainer")
def test_a_trainer_takes_over_the_workers_that_wait_for_it():
    (waiting,) = actor_pool.idle_pools
    ids = {actor._actor_id.hex() for actor in waiting.actors}
    with start(num_workers=2) as trainer:
        assert actor_pool.idle_pools == []
        assert set(trainer.apply_all_workers(_actor_id)) == ids
        assert len(set(trainer.apply_all_workers(os.getpid))) == 2
        trainer.train(num_steps=15)
        assert farthest(trainer.get_model(), one_process()) < 1e-12


def _actor_id():
    return ray.get_runtime_context().get_actor_id()


@pytest.mark.slow
def test_workers_that_are_kept_serve_one_trainer_after_the_other():
    processes = []
    for _ in range(2):
        with start(num_workers=2) as trainer:
            processes.append(trainer.apply_all_workers(os.getpid))
            trainer.apply_all_workers(_leave_traces)
            trainer.train(num_steps=15)
            assert farthest(trainer.get_model(), one_process()) < 1e-12
            assert not any(trainer.apply_all_operators(_has_traces))
            trainer.apply_all_operators(_mark)
    assert processes[0] == processes[1]


@pytest.mark.slow
def test_a_worker_that_died_is_replaced_among_those_that_are_kept():
    with start(num_workers=3) as trainer:
        before = trainer.apply_all_workers(os.getpid)
        os.kill(before[1], signal.SIGKILL)
        trainer.train(num_steps=15)
    with start(num_workers=3) as trainer:
        after = trainer.apply_all_workers(os.getpid)
        assert len(set(after) & set(before)) == 2
        assert before[1] not in after
        os.kill(after[0], signal.SIGKILL)
        trainer.train(num_steps=15)
        assert farthest(trainer.get_model(), one_process()) < 1e-12


@pytest.mark.slow
def test_a_worker_that_died_while_it_was_idle_is_replaced():
    with start(num_workers=2) as trainer:
        before = trainer.apply_all_workers(os.getpid)
    os.kill(before[1], signal.SIGKILL)
    with start(num_workers=2) as trainer:
        after = trainer.apply_all_workers(os.getpid)
        assert set(after) & set(before) == {before[0]}
        trainer.train(num_steps=15)
        assert farthest(trainer.get_model(), one_process()) < 1e-12
        assert trainer.status()["recoveries"] == []


def _leave_traces():
    torch.manual_seed(1)
    random.seed(1)


def _mark(operator):
    operator.marked = True


def _has_traces(operator):
    return hasattr(operator, "marked")


@pytest.mark.slow
@pytest.mark.usefixtures("workers_end_with_their_trainer")
def test_workers_that_are_not_kept_end_with_their_trainer():
    with start(num_workers=2) as trainer:
        before = trainer.apply_all_workers(os.getpid)
    with start(num_workers=2) as trainer:
        after = trainer.apply_all_workers(os.getpid)
    assert not set(before) & set(after)


@pytest.mark.slow
def test_a_failure_ends_workers_that_would_be_kept():
    with start(num_workers=2) as trainer:
        before = trainer.apply_all_workers(os.getpid)
        with pytest.raises(ZeroDivisionError):
            trainer.apply_all_operators(_break_the_next_step)
            trainer.train(num_steps=1)
    with start(num_workers=2) as trainer:
        assert not set(before) & set(trainer.apply_all_workers(os.getpid))


def _break_the_next_step(operator):
    def fail(*_):
        raise ZeroDivisionError

    operator.compute_loss = fail


@pytest.mark.slow
@pytest.mark.usefixtures("workers_end_with_their_trainer")
def test_a_trainer_with_a_worker_here_and_a_spare_takes_over_its_own():
    lockstep.prestart(num_workers=2, use_local=True, spare_workers=1)
    (waiting,) = actor_pool.idle_pools
    ids = {actor._actor_id.hex() for actor in waiting.actors}
    assert len(ids) == 2
    arguments = {"num_workers": 2, "use_local": True, "spare_workers": 1}
    with TorchTrainer(
        training_operator_cls=DefaultLoop, config={BATCH_SIZE: 12}, **arguments
    ) as trainer:
        here, other = trainer.apply_all_workers(os.getpid)
        assert here == os.getpid() != other
        assert set(trainer.apply_all_workers(_actor_id)) - {None} < ids
        trainer.train(num_steps=15)
        assert farthest(trainer.get_model(), one_process()) < 1e-12


@pytest.mark.parametrize("num_workers", [0, -1, "two"])
def test_a_number_of_workers_that_cannot_be_is_named(num_workers):
    with pytest.raises(ValueError, match="an int, 1 or more"):
        lockstep.prestart(num_workers)


@pytest.mark.slow
@pytest.mark.usefixtures("workers_end_with_their_trainer")
def test_workers_that_nobody_wants_are_sent_home(monkeypatch):
    lockstep.prestart(num_workers=3)
    with start(num_workers=4) as trainer:  # all there is, so the three are gone
        assert len(set(trainer.apply_all_workers(os.getpid))) == 4
    lockstep.prestart(num_workers=2)
    lockstep.prestart(num_workers=4)
    actor_pool.end_idle_pools()
    monkeypatch.setenv("LOCKSTEP_START_TIMEOUT_S", "1")
    with pytest.raises(NotEnoughResourcesError, match="5 workers"):
        lockstep.prestart(num_workers=5)
    assert actor_pool.idle_pools == []
