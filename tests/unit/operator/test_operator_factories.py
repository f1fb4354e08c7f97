# SPDX-License-Identifier: Apache-2.0
"""Operators from functions, and around objects that already exist."""

import fcntl
import hashlib
import os
import subprocess
import threading
from functools import partial

import pytest
import torch
from tests.unit.trainer.programs import (
    SAMPLES,
    by_hand,
    linear,
    loader,
    same,
    sgd,
    trainer,
    weights,
)
from torch import nn

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError, WrongTypeError
from lockstep.operator import operator_factories
from lockstep.operator.given_objects import GivenObjects
from lockstep.operator.host_file_lock import host_lock


def make_model(config):
    return linear()


def make_optimizer(model, config):
    return sgd(model, config["lr"])


def make_data(config):
    return loader(), loader()


def make_scheduler(optimizer, config):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def test_all_creators():
    operator = TrainingOperator.from_creators(
        make_model, make_optimizer, make_data, nn.MSELoss, make_scheduler
    )
    assert issubclass(operator, TrainingOperator)
    with trainer(operator, config={"lr": 0.1}, scheduler_step_freq="epoch") as one:
        assert one.train()["num_samples"] == SAMPLES
        assert one.validate()["num_samples"] == SAMPLES
        inside = one.get_local_operator()
        assert inside.models == [inside.model]
        assert inside.optimizers == [inside.optimizer]
        assert inside.schedulers == [inside.scheduler]
        assert isinstance(inside.criterion, nn.MSELoss)
        assert inside.optimizer.param_groups[0]["lr"] == 0.05
        assert same(weights(one.get_model()), by_hand(4))


def test_a_function_as_loss_creator_gets_the_config():
    def make_loss(config):
        return nn.HuberLoss(delta=config["delta"])

    operator = TrainingOperator.from_creators(
        make_model, make_optimizer, lambda config: loader(), make_loss
    )
    with trainer(operator, config={"lr": 0.1, "delta": 0.25}) as one:
        assert one.get_local_operator().criterion.delta == 0.25
        assert one.train()["batch_count"] == 4
        with pytest.raises(ConfigurationError, match="validation_loader="):
            one.validate()


def test_several_models_and_optimizers():
    class Both(TrainingOperator):
        def train_batch(self, batch, batch_info):
            features, target = batch
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(features), target).backward()
                optimizer.step()
            return {}

    operator = Both.from_creators(
        lambda config: [linear(), linear()],
        lambda models, config: [sgd(model, config["lr"]) for model in models],
        make_data,
        scheduler_creator=lambda optimizers, config: [
            make_scheduler(optimizer, config) for optimizer in optimizers
        ],
    )
    with trainer(operator, config={"lr": 0.1}, scheduler_step_freq="manual") as one:
        one.train()
        models = one.get_model()
        inside = one.get_local_operator()
        assert len(inside.optimizers) == len(inside.schedulers) == 2
        assert inside.criterion is None
    for model in models:
        assert same(weights(model), by_hand(4))


def test_a_scheduler_without_a_loss_is_a_scheduler():
    class OwnLoss(TrainingOperator):
        def compute_loss(self, batch, batch_info):
            features, target = batch
            return nn.functional.mse_loss(self.model(features), target)

    operator = OwnLoss.from_creators(
        make_model, make_optimizer, make_data, scheduler_creator=make_scheduler
    )
    with trainer(operator, config={"lr": 0.1}, scheduler_step_freq="epoch") as one:
        one.train()
        inside = one.get_local_operator()
        assert inside.criterion is None
        assert inside.scheduler.last_epoch == 1
        assert inside.optimizer.param_groups[0]["lr"] == 0.05


def test_what_cannot_be_a_creator_is_refused():
    with pytest.raises(WrongTypeError, match="model_creator is not callable"):
        TrainingOperator.from_creators("linear", make_optimizer)
    three = TrainingOperator.from_creators(make_model, make_optimizer, lambda config: (1, 2, 3))
    with pytest.raises(ConfigurationError, match=r"train_loader, validation_loader"):
        trainer(three, config={"lr": 0.1})
    pair = TrainingOperator.from_creators(make_model, make_optimizer, lambda config: [loader()] * 2)
    with pytest.raises(ConfigurationError, match=r"got +a list of 2 items"):
        trainer(pair, config={"lr": 0.1})


@pytest.mark.parametrize("serialize", [True, False])
def test_workers_of_a_machine_make_their_data_one_after_the_other(serialize, tmp_path, monkeypatch):
    # Not the machine's own: other tests' workers take turns by that one meanwhile.
    lock = str(tmp_path / "lock")
    monkeypatch.setattr(operator_factories, "host_lock", partial(host_lock, lock))

    def download(config):
        try:
            # Another handle, as another process has one.
            with open(lock, "a") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            was_alone.append(False)
        except BlockingIOError:
            was_alone.append(True)
        return loader()

    was_alone = []
    operator = TrainingOperator.from_creators(
        make_model, make_optimizer, download, nn.MSELoss, serialize_data_creation=serialize
    )
    with trainer(operator, config={"lr": 0.1}) as one:
        assert one.train()["batch_count"] == 4
    assert was_alone == [serialize]
    assert not serialize or not os.path.exists(lock)


def test_turns_do_not_overlap_and_leave_no_file(tmp_path):
    path = str(tmp_path / "turns")
    inside, overlaps, work = [], [], bytes(10**6)

    def takes_turns(name):
        for _ in range(25):
            with host_lock(path):
                overlaps.extend(inside)
                inside.append(name)
                hashlib.sha256(work)  # long enough for another thread to come
                inside.remove(name)

    threads = [threading.Thread(target=takes_turns, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    with pytest.raises(LookupError), host_lock(path):
        raise LookupError
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_forked_inside_keeps_nobody_waiting(tmp_path):
    path = str(tmp_path / "turns")
    ends, goes_on = os.pipe()
    waits = threading.Event()
    came = []

    def second():
        waits.set()
        with host_lock(path):
            came.append(True)

    other = threading.Thread(target=second)
    with host_lock(path):
        child = subprocess.Popen(["cat"], stdin=ends, pass_fds=_open_at(path))
        other.start()
        waits.wait()
    other.join(timeout=30)
    os.close(ends)
    os.close(goes_on)
    child.wait(timeout=30)
    assert came


def _open_at(path):
    """The descriptors of this process that are of the file at `path`."""
    links = [(int(name), f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return [number for number, link in links if os.path.lexists(link) and os.readlink(link) == path]


def test_around_a_model_of_ones_own_that_then_holds_the_trained_state():
    model = linear()
    optimizer = sgd(model)
    operator = TrainingOperator.from_model(
        model,
        optimizer=optimizer,
        criterion=nn.MSELoss(),
        train_loader=loader(),
        validation_loader=loader(),
    )
    with TorchTrainer(training_operator_cls=operator) as one:
        for epoch in (1, 2):
            one.train()
            assert same(weights(model), by_hand(4 * epoch))
            assert len(optimizer.state) == 2
        assert one.validate()["num_samples"] == SAMPLES
        assert weights(one.get_model()).equal(weights(model))
        state = one.state_dict()
        one.train()
        one.load_state_dict(state)
        assert same(weights(model), by_hand(8))
    # Nothing of lockstep is left on the objects: a plain step, and a second trainer, work.
    optimizer.zero_grad()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    with TorchTrainer(training_operator_cls=operator) as one:
        assert one.train()["batch_count"] == 4


def test_what_a_program_changes_of_its_own_objects_is_in_the_checkpoint(tmp_path):
    def run(folder, until, forces=False):
        model = linear()
        optimizer = sgd(model)
        operator = TrainingOperator.from_model(
            model, optimizer=optimizer, criterion=nn.MSELoss(), train_loader=loader()
        )
        one = trainer(operator, checkpoint_dir=folder, checkpoint_every=2, resume="auto")
        while one.status()["step"] < until:
            one.train(num_steps=2)
            optimizer.param_groups[0]["lr"] /= 2
        if forces:  # a step behind the newest checkpoint
            one.train(num_steps=1)
        one.shutdown(force=forces)
        return weights(model), optimizer.param_groups[0]["lr"]

    expected = run(tmp_path / "whole", 8)
    run(tmp_path / "killed", 4, forces=True)
    resumed = run(tmp_path / "killed", 8)
    assert torch.equal(resumed[0], expected[0])
    assert resumed[1] == expected[1]


def test_a_setup_that_fails_lets_go_of_the_model():
    model = linear()

    class Broken(TrainingOperator):
        def register_data(self, **loaders):
            raise LookupError("no data")

    given = {"optimizer": sgd(model), "criterion": nn.MSELoss(), "train_loader": loader()}
    with pytest.raises(LookupError, match="no data") as caught:
        trainer(Broken.from_model(model, **given))
    with trainer(TrainingOperator.from_model(model, **given)) as one:
        one.train()
        assert same(weights(model), by_hand(4))
    del caught


@pytest.mark.parametrize(
    ("model", "optimizer", "named"),
    [
        (nn.Linear, sgd(linear()), "one model, an instance"),
        ([linear()], sgd(linear()), "one model, an instance"),
        (linear(), "sgd", "one optimizer, an instance"),
    ],
)
def test_what_cannot_be_trained_is_refused(model, optimizer, named):
    with pytest.raises(WrongTypeError, match=named):
        TrainingOperator.from_model(model, optimizer=optimizer)


def test_a_scheduler_around_the_given_optimizer_works_where_the_very_object_trains():
    trained, expected = linear(), linear()
    optimizer, plain = sgd(trained), sgd(expected)
    operator = TrainingOperator.from_model(
        trained, optimizer=optimizer, criterion=nn.MSELoss(), train_loader=loader()
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    with TorchTrainer(training_operator_cls=operator) as one:
        for _ in range(3):
            one.train()
            scheduler.step()
    for epoch in range(3):
        plain.param_groups[0]["lr"] = 0.1 * 0.1**epoch
        for features, targets in loader():
            plain.zero_grad()
            nn.functional.mse_loss(expected(features), targets).backward()
            plain.step()
    assert same(weights(trained), weights(expected))


def test_settings_that_were_changed_are_named():
    first, second = linear(), linear()
    optimizer = torch.optim.AdamW(first.parameters(), lr=torch.tensor(0.5))
    given = GivenObjects(first, [optimizer])
    assert given.changes() == []
    (group,) = optimizer.param_groups
    # Notes of a scheduler's, modes, and what is no number.
    group.update(initial_lr=0.5, maximize=True, schedule=object())
    assert given.changes() == []
    group["lr"].fill_(0.25)
    group["betas"] = (0.5, 0.999)
    assert given.changes() == ["lr 0.5 -> 0.25", "betas [0.9, 0.999] -> [0.5, 0.999]"]
    assert given.differs_from([{"lr": 0.5}])
    assert not given.differs_from([{"lr": 0.25, "betas": [0.5, 0.999]}])
    optimizer.add_param_group({"params": second.parameters()})
    assert given.changes() == ["1 -> 2 parameter groups"]
    given.note_settings()
    assert given.changes() == []
