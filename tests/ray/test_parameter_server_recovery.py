# SPDX-License-Identifier: Apache-2.0
"""sync="parameter_server": workers die, and the server goes on with those that are left."""

import os
import random
import signal

import pytest
import torch
from tests.ray.operators import STEPS, DefaultLoop, PlainBackward, farthest, one_process
from tests.ray.surviving import (
    GLOBAL_BATCH,
    Classifier,
    OwnEpoch,
    TwoPlayers,
    Windows,
    digest,
    digits_of,
    trainer_of,
)
from tests.ray.test_failures import _alive
from tests.ray.test_parameter_server import server_of, start
from tests.ray.test_recovery import KILLED, counts, train_by_parts, until_complete

from lockstep.errors import WorkerDiedError
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike, struck

# Each death starts a process that imports torch: seconds, and many where the processors are busy.
pytestmark = pytest.mark.timeout(400)

SERVED = {"sync": "parameter_server"}
PARTS = (4, 4, 4, 4, 4, 4)


@pytest.mark.slow
def test_a_worker_dies_between_two_optimizers_and_the_other_goes_on_alone():
    """Rank 0, whose gradients the server took; it has made a step that nobody has counted."""
    strike = Strike("kill", rank=0, step=5, phase="applied")
    with start(struck(PlainBackward, strike)) as trainer:
        assert trainer.train(num_steps=STEPS)["batch_count"] == STEPS
        (recovery,) = trainer.status()["recoveries"]
        by_forward, by_method = trainer.get_model()
    assert recovery["workers"] == 1
    assert farthest(by_forward, one_process()) < 1e-12
    assert farthest(by_method, one_process("another_way")) < 1e-12


def in_every_phase():
    """One in each part of the run, whose beginning finds both workers and a spare.

    Those around an optimizer's step hit a batch that also ends a window of two.
    """
    return [
        Strike("kill", rank=1, step=2, phase="forward"),
        Strike("kill", rank=0, step=5, phase="backward"),
        Strike("kill", rank=1, step=9, phase="buckets"),
        Strike("kill", rank=0, step=15, phase="optimizer"),
        Strike("kill", rank=1, step=17, phase="applied"),
        Strike("kill", rank=0, step=22, phase="applied"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("operator_cls", [Classifier, TwoPlayers, OwnEpoch, Windows])
def test_with_spares_no_bit_changes(operator_cls):
    """Weights, statistics, moments of Adam, schedules: a part goes on from those of the last."""
    strikes = in_every_phase()
    with trainer_of(operator_cls, **SERVED) as trainer:
        expected, bits = train_by_parts(trainer, 2, PARTS)
        state = trainer.state_dict()["optimizers"]
    with trainer_of(operator_cls, strikes, spare_workers=1, **SERVED) as trainer:
        results, got = train_by_parts(trainer, 3, PARTS)
        recoveries = trainer.status()["recoveries"]
        moments = trainer.state_dict()["optimizers"]
    assert got == bits
    assert counts(results) == counts(expected)
    assert len(recoveries) == len(strikes)
    assert all(each["same_bits"] for each in recoveries)
    assert all(map(_same_moments, moments, state))


def _same_moments(one, other):
    pairs = [(one["state"][number], other["state"][number]) for number in other["state"]]
    return len(pairs) > 0 and all(
        torch.equal(mine[name], theirs[name]) for mine, theirs in pairs for name in theirs
    )


@pytest.mark.slow
def test_two_die_at_once_and_the_group_grows_back():
    """Three workers and a spare; then two, one, and as many as there are places."""
    strikes = [
        Strike("kill", rank=0, step=1, phase="forward"),
        Strike("kill", rank=2, step=1, phase="forward"),
        Strike("kill", rank=1, step=3, phase="optimizer"),
        Strike("kill", rank=1, step=9, phase="buckets"),
    ]
    operator_cls = struck(DefaultLoop, *strikes)
    with start(operator_cls, num_workers=3, num_shards=4, spare_workers=1) as trainer:
        trainer.train(num_steps=5)
        until_complete(trainer, 4)
        assert trainer.train(num_steps=3)["num_samples"] > 0
        assert trainer.status()["workers"] == 3
        trainer.train(num_steps=STEPS - 8)
        recoveries = trainer.status()["recoveries"]
        assert sum(len(each["lost"]) for each in recoveries) == len(strikes)
        assert min(each["workers"] for each in recoveries) <= 2
        assert farthest(trainer.get_model(), one_process()) < 1e-12
        assert trainer.verify(num_steps=2).ok


@pytest.mark.slow
def test_alone_it_is_saved_loaded_and_verified(tmp_path):
    strike = Strike("kill", rank=0, step=1, phase="buckets")
    with start(struck(DefaultLoop, strike)) as trainer:
        trainer.train(num_steps=STEPS - 4)
        path = trainer.save(tmp_path / "state")
        trainer.train(num_steps=2)
        trainer.load(path)
        assert trainer.verify(num_steps=2).ok
        until_complete(trainer, 2)
        trainer.train(num_steps=4)
        assert trainer.status()["workers"] == 2
        assert farthest(trainer.get_model(), one_process()) < 1e-12


class Executioner(torch.optim.Adam):
    """At the server: makes a step, and ends a worker before it can hear of it."""

    def __init__(self, params, folder, victim, at):
        super().__init__(params, lr=0.01)
        self.about = (folder, victim, at)
        self.taken = 0

    def step(self, closure=None):
        super().step(closure)
        folder, victim, at = self.about
        self.taken += 1
        if self.taken == at:
            with open(os.path.join(folder, str(victim))) as file:
                pid = int(file.read())
            os.kill(pid, signal.SIGKILL)
            while _alive(pid):
                pass


class Watched(Classifier):
    """Each worker says where its process is found, under the rank of then."""

    def setup(self, config):
        super().setup(config)
        with open(os.path.join(config["folder"], str(self.world_rank)), "w") as file:
            file.write(str(os.getpid()))

    def register(self, *, optimizers, schedulers, **parts):
        (group,) = optimizers.param_groups
        folder, victim, at = (self.config[name] for name in ("folder", "victim", "at"))
        own = Executioner(group["params"], folder, victim, at)
        schedule = torch.optim.lr_scheduler.StepLR(own, 3, 0.9)
        return super().register(optimizers=own, schedulers=schedule, **parts)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_dies_when_the_server_has_stepped_and_has_not_answered(victim, tmp_path):
    found = []
    for at in (-1, 4):
        config = {BATCH_SIZE: GLOBAL_BATCH, "folder": tmp_path, "victim": victim, "at": at}
        arguments = {"config": config, "scheduler_step_freq": "batch", "spare_workers": 1}
        with trainer_of(Watched, **arguments, **SERVED) as trainer:
            trainer.train(num_steps=10)
            found.append(digest(trainer))
            recoveries = trainer.status()["recoveries"]
    assert found[0] == found[1]
    # The other one has heard of the step: it is not computed again.
    assert [each["step"] for each in recoveries] == [4]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["save", "state_dict", "train", "validate", "get_model"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_between_calls_is_found_by_any_call(call, victim, tmp_path):
    arguments = {"save": [tmp_path / "saved"]}.get(call, [])
    found = []
    for dies in (False, True):
        with trainer_of(Classifier, spare_workers=1, **SERVED) as trainer:
            trainer.train(num_steps=3)
            if dies:
                os.kill(trainer.apply_all_workers(os.getpid)[victim], signal.SIGKILL)
            getattr(trainer, call)(*arguments)
            trainer.train(num_steps=3)
            found.append(digest(trainer))
            assert len(trainer.state_dict()["optimizers"][0]["state"]) == 6
            assert len(trainer.status()["recoveries"]) == dies
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("use_local", [False, True])
def test_a_worker_that_is_stopped_is_replaced(use_local):
    strikes = [Strike("stop", rank=1, step=5, phase="forward")]
    with trainer_of(Classifier, **SERVED) as trainer:
        trainer.train(num_steps=10)
        bits = digest(trainer)
    arguments = {"spare_workers": 1, "hang_timeout_s": 1, "use_local": use_local, **SERVED}
    with trainer_of(Classifier, strikes, **arguments) as trainer:
        trainer.train(num_steps=10)
        (recovery,) = trainer.status()["recoveries"]
        assert digest(trainer) == bits
    assert "stopped" in recovery["why"]


class OwnScaler(Classifier):
    """Scales its losses itself."""

    def setup(self, config):
        super().setup(config)
        self.scaler = torch.amp.GradScaler("cpu")

    def train_batch(self, batch, batch_info):
        features, classes = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), classes)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"train_loss": loss.item()}


@pytest.mark.slow
@pytest.mark.parametrize("operator_cls", [Classifier, OwnScaler])
def test_gradients_are_unscaled_once_more(operator_cls):
    """What is interrupted is the step itself, when a scaler has unscaled its gradients."""
    strikes = [Strike("kill", rank=1, step=5, phase="optimizer")]
    arguments = {"scheduler_step_freq": "batch", "spare_workers": 1, **SERVED}
    if operator_cls is Classifier:
        arguments["precision"] = "fp16"
    found = []
    for struck_by in ([], strikes):
        with trainer_of(operator_cls, struck_by, **arguments) as trainer:
            trainer.train(num_steps=10)
            found.append(digest(trainer))
            assert len(trainer.status()["recoveries"]) == len(struck_by)
    assert found[0] == found[1]


class EndsTheServerAndItself(DefaultLoop):
    """Rank 1 kills the process that `victim` names, and itself."""

    victim = None

    def compute_loss(self, batch, batch_info):
        if self.victim and self.world_rank == 1:
            os.kill(self.victim, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_loss(batch, batch_info)


@pytest.mark.slow
def test_nobody_goes_on_without_the_server():
    trainer = start(EndsTheServerAndItself)
    pids = [*trainer.apply_all_workers(os.getpid), server_of(trainer).pid]

    def choose(operator, victim=pids[-1]):
        operator.victim = victim

    trainer.apply_all_operators(choose)
    with pytest.raises(WorkerDiedError, match="parameter server"):
        trainer.train()
    assert not any(map(_alive, pids))


def _held(pid):
    """What a process holds: threads and sockets."""
    links = (f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd"))
    sockets = sum(os.path.lexists(each) and "socket:" in os.readlink(each) for each in links)
    return len(os.listdir(f"/proc/{pid}/task")), sockets


@pytest.mark.slow
def test_the_server_holds_nothing_of_earlier_generations():
    with trainer_of(Classifier, spare_workers=1, **SERVED) as trainer:
        server = server_of(trainer).pid
        held = []
        for _ in range(6):
            until_complete(trainer, 3)
            trainer.train(num_steps=2)
            os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
            trainer.train(num_steps=2)
            held.append(_held(server))
        assert len(trainer.status()["recoveries"]) == 6
    # Ray's own come and go with the number of calls that it serves, and the first are on their way:
    # what a generation left would be there four times.
    assert held[-1][1] < held[1][1] + 4
    assert held[-1][0] < held[1][0] + 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 3))],
)
def test_random_kills(seed, tmp_path):
    """Eighteen in all, of the digits' workers; a stopped worker is found after a second."""
    generator = random.Random(seed)
    strikes = []
    for begin in range(0, 24, 4):
        action = generator.choice(["kill", "kill", "kill", "stop"])
        phase, step = generator.choice(KILLED), begin + generator.randrange(4)
        strikes.append(Strike(action, rank=generator.randrange(2), step=step, phase=phase))
    with digits_of(num_workers=2, **SERVED) as trainer:
        expected, bits = train_by_parts(trainer, 2, PARTS)
    arguments = {"num_workers": 2, "spare_workers": 1, "hang_timeout_s": 1, **SERVED}
    with digits_of(strikes, **arguments) as trainer:
        results, got = train_by_parts(trainer, 3, PARTS)
        recoveries = trainer.status()["recoveries"]
    assert got == bits, strikes
    assert counts(results) == counts(expected), strikes
    assert sum(len(each["lost"]) for each in recoveries) == len(strikes)
