# SPDX-License-Identifier: Apache-2.0
"""Calls that reach workers through relays: four workers in two groups, of which ranks 0 and 2 are
the relays."""

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from functools import cache

import cloudpickle
import pytest
from tests.ray.surviving import (
    GLOBAL_BATCH,
    Classifier,
    digest,
    run,
    undisturbed,
    until_complete,
)
from tests.ray.surviving import trainer_of as direct_trainer_of

import ray
from lockstep.engine.call_relay import next_call_number, relay_groups
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike
from lockstep.worker import Worker

FOUR = {"num_workers": 4, "num_shards": 4, "reproducible": True}
CALLS = {"perform", "relay"}


def trainer_of(*arguments, **options):
    """Of workers that the driver reaches through relays, as it does where there are many."""
    trainer = direct_trainer_of(*arguments, **options)
    trainer._workers._engine.workers.ranks_per_relay = 2
    return trainer


class Counting:
    """An actor's handle that counts the calls of its methods."""

    def __init__(self, actor, counts):
        self._actor, self._counts = actor, counts

    def __getattr__(self, name):
        if name in CALLS:
            self._counts[name] += 1
        return getattr(self._actor, name)


@contextmanager
def messages(trainer):
    """The calls that the driver sends meanwhile."""
    counts, members = Counter(), list(members_of(trainer))
    actors = [member.actor for member in members]
    for member in members:
        member.actor = Counting(member.actor, counts)
    try:
        yield counts
    finally:
        for member, actor in zip(members, actors, strict=True):
            member.actor = actor


def members_of(trainer):
    return trainer._workers._engine.workers.members


@pytest.mark.other_workers
def test_the_driver_sends_a_call_to_the_relays_alone():
    expected = undisturbed(Classifier, **FOUR)
    with trainer_of(Classifier, **FOUR) as trainer:
        with messages(trainer) as sent:
            found = run(trainer)
        # Four calls of `train`, and `get_model` of rank 0.
        assert sent == {"relay": 8, "perform": 1}
    assert found == expected


def test_few_workers_need_no_relays():
    with direct_trainer_of(Classifier, **FOUR) as trainer:
        with messages(trainer) as sent:
            trainer.train(num_steps=1)
        assert sent == {"perform": 4}


def test_the_groups_are_runs_of_ranks():
    names = [str(rank) for rank in range(150)]
    assert relay_groups(names) == [range(64), range(64, 128), range(128, 150)]
    assert relay_groups(names[:127]) == []
    assert relay_groups(["", *names[1:]]) == []  # rank 0 lives in the driver's process


@pytest.mark.other_workers
def test_large_answers_come_directly():
    with trainer_of(Classifier, **FOUR) as trainer:
        with messages(trainer) as sent:
            small = trainer.apply_all_workers(lambda: b"." * 1_000)
        assert sent == {"relay": 4}  # the workers are pinged first
        with messages(trainer) as sent:
            large = trainer.apply_all_workers(lambda: b"." * 200_000)
        assert sent == {"relay": 4, "perform": 4}
    assert (small, large) == ([b"." * 1_000] * 4, [b"." * 200_000] * 4)


@pytest.mark.other_workers
def test_an_error_behind_a_relay_has_its_rank_and_the_run_goes_on():
    _, expected = undisturbed(Classifier, **FOUR)
    with trainer_of(Classifier, [Strike("raise", 3, 4, "backward")], **FOUR) as trainer:
        with pytest.raises(RuntimeError, match="struck in step 4, backward") as caught:
            trainer.train()
        assert "raised on rank 3" in "\n".join(caught.value.__notes__)
        trainer.train()  # the rest of the epoch
        trainer.train()
        trainer.train()
        trainer.train(num_steps=4)
        assert digest(trainer) == expected
        assert trainer.status()["recoveries"] == []


@pytest.mark.other_workers
@pytest.mark.parametrize(
    "rank", [2, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 1, 3))]
)
@pytest.mark.timeout(120)
def test_the_death_of_a_relay_or_of_a_worker_behind_one_is_that_of_one_rank(rank):
    """The relays, ranks 0 and 2, die in the middle of a call that they have brought to others."""
    _, expected = undisturbed(Classifier, **FOUR)
    with trainer_of(Classifier, [Strike("kill", rank, 9, "backward")], **FOUR) as trainer:
        _, found = run(trainer)
        (recovery,) = trainer.status()["recoveries"]
    assert found == expected
    assert [lost.partition(", ")[2].partition(", ")[2] for lost in recovery["lost"]] == [
        f"rank {rank}"
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_replacement_is_reached_through_a_relay():
    with trainer_of(Classifier, [Strike("kill", 2, 4, "backward")], **FOUR) as trainer:
        trainer.train()
        until_complete(trainer, 4)
        trainer.train(num_steps=2)
        assert {member.number for member in members_of(trainer)} == {0, 1, 3, 4}
        with messages(trainer) as sent:
            trainer.train(num_steps=1)
        assert sent == {"relay": 2}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_relay_that_is_stopped_before_it_brings_a_call_takes_nobody_along():
    """The rank behind it has no call, and is not said to keep the others waiting."""
    _, expected = undisturbed(Classifier, **FOUR)
    with trainer_of(Classifier, hang_timeout_s=4, **FOUR) as trainer:
        trainer.train()
        pids = trainer.apply_all_workers(os.getpid)
        os.kill(pids[2], signal.SIGSTOP)
        trainer.train()
        trainer.train()
        trainer.train(num_steps=4)
        assert digest(trainer) == expected
        (recovery,) = trainer.status()["recoveries"]
    assert recovery["workers"] == 3
    assert "was stopped" in recovery["why"]


@pytest.mark.slow
def test_an_error_arrives_though_its_relay_is_stopped():
    def act(operator):
        if operator.world_rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if operator.world_rank == 3:
            raise LookupError("behind a relay that is stopped")

    with (
        trainer_of(Classifier, hang_timeout_s=3600, **FOUR) as trainer,
        pytest.raises(LookupError, match="behind a relay that is stopped"),
    ):
        trainer.apply_all_operators(act)


@pytest.mark.slow
def test_an_error_arrives_though_all_others_are_busy():
    def act(operator):
        if operator.world_rank == 3:
            raise LookupError("behind a relay that waits for its own rank")
        time.sleep(3600)

    with (
        trainer_of(Classifier, hang_timeout_s=3600, **FOUR) as trainer,
        pytest.raises(LookupError, match="behind a relay"),
    ):
        trainer.apply_all_operators(act)


class InterruptsDriver(Classifier):
    """Somebody presses Ctrl-C while rank 3 is in a step."""

    def compute_loss(self, batch, batch_info):
        is_first = not hasattr(self, "was_there")
        if self.world_rank == 3 and batch_info["global_step"] == 4 and is_first:
            self.was_there = True
            os.kill(self.config["driver"], signal.SIGINT)
        return super().compute_loss(batch, batch_info)


@pytest.mark.slow
def test_after_ctrl_c_training_goes_on():
    _, expected = undisturbed(Classifier, **FOUR)
    config = {BATCH_SIZE: GLOBAL_BATCH, "driver": os.getpid()}
    with trainer_of(InterruptsDriver, config=config, **FOUR) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        # The epoch may have come to its end while the signal was on its way.
        if trainer.status()["step"] < 7:
            trainer.train()
        trainer.train()
        trainer.train()
        trainer.train(num_steps=4)
        assert digest(trainer) == expected
        assert trainer.apply_all_workers(os.getpid) == pids


def test_no_call_is_performed_twice_and_none_after_a_later_one(tmp_path):
    """Whether the driver or a relay brings it first."""
    with trainer_of(Classifier, **FOUR) as trainer:
        actor = members_of(trainer)[1].actor

        def sent(name, path, number):
            arguments = cloudpickle.dumps(((lambda: path.open("a").write("x"),), {}))
            method = cloudpickle.dumps(Worker.call)
            return ray.get(getattr(actor, name).remote(method, arguments, number))

        early, number, late = (next_call_number() for _ in range(3))
        one, other = tmp_path / "one", tmp_path / "other"
        brought = sent("perform_for_relay", one, number)
        assert sent("perform", one, number) == brought
        assert sent("perform_for_relay", one, early) is None
        assert one.read_text() == "x"
        # The driver has asked before the relay's message comes.
        assert sent("perform", other, late).error is None
        assert sent("perform_for_relay", other, late) is None
        assert other.read_text() == "x"


SIX = {
    "num_workers": 6,
    "num_shards": 6,
    "num_cpus_per_worker": 0.5,
    "reproducible": True,
    "config": {BATCH_SIZE: 26},  # each shard has several rows, as batch normalisation wants them
}


@cache
def undisturbed_six():
    with direct_trainer_of(Classifier, **SIX) as trainer:
        return run(trainer)[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_bits_are_those_of_an_undisturbed_run_whoever_is_killed_and_when(seed):
    """Three groups; those that are left have relays as well, until fewer than four are."""
    expected = undisturbed_six()
    chance, trained = random.Random(seed), threading.Event()
    with trainer_of(Classifier, **SIX) as trainer:
        pids = trainer.apply_all_workers(os.getpid)

        def kill(victims):
            for pid in victims:
                trained.wait(chance.uniform(0, 1))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        killing = threading.Thread(target=kill, args=(chance.sample(pids, 2),))
        killing.start()
        _, found = run(trainer)
        trained.set()
        killing.join()
        lost = [each for recovery in trainer.status()["recoveries"] for each in recovery["lost"]]
    assert found == expected
    assert len(lost) <= 2
