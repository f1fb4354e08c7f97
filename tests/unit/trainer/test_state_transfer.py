# SPDX-License-Identifier: Apache-2.0
"""A run that is saved, loaded and continued ends where the undisturbed run ends."""

import copy
import math
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from tests.unit.trainer.programs import (
    Regression,
    by_hand,
    linear,
    loader,
    same,
    sgd,
    trainer,
    weights,
)
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from lockstep.keys import BATCH_SIZE

SHUFFLED = {"shuffle": True}


class Everything(Regression):
    """Dropout, BatchNorm, Adam, a schedule, a criterion with parameters, state of its own."""

    def setup(self, config):
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
        ).double()
        self.criterion = Temperature()
        parameters = [*self.model.parameters(), *self.criterion.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=0.01)
        self.register(
            models=self.model,
            optimizers=self.optimizer,
            criterion=self.criterion,
            schedulers=torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5),
        )
        self.register_data(train_loader=loader(shuffle=True), validation_loader=loader())
        self.drawn = []

    def compute_loss(self, batch, batch_info):
        self.drawn.append((random.random(), float(np.random.rand()), float(batch[0][0, 0])))
        return super().compute_loss(batch, batch_info)

    def state_dict(self):
        return {"drawn": list(self.drawn)}

    def load_state_dict(self, state):
        self.drawn = [tuple(draw) for draw in state["drawn"]]


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output, target):
        return (output * self.scale - target).square().mean()


def everything(one):
    state = one.state_dict()
    operator = one.get_local_operator()
    return state, operator.drawn, one.validate()


@pytest.mark.parametrize("through", ["file", "memory"])
@pytest.mark.parametrize("before", [3, 4, 6])
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path, through, before):
    arguments = {"operator": Everything, "scheduler_step_freq": "batch", "seed": 3}
    with trainer(**arguments) as one:
        one.train(num_steps=9)
        expected = everything(one)
    with trainer(**arguments) as one:
        one.train(num_steps=before)
        state = one.state_dict()
        path = one.save(tmp_path / "run.pt")
        one.train(num_steps=1)  # what is saved is a copy
    with trainer(**arguments) as one:
        one.train(num_steps=2)
        one.load(path) if through == "file" else one.load_state_dict(state)
        assert one.get_local_operator().global_step == before
        one.train(num_steps=9 - before)
        got = everything(one)
    assert got[1] == expected[1]
    assert got[2] == expected[2]
    _assert_equal(got[0], expected[0])


def _assert_equal(got, expected):
    assert type(got) is type(expected)
    if isinstance(got, torch.Tensor):
        assert torch.equal(got, expected)
    elif isinstance(got, dict):
        assert got.keys() == expected.keys()
        for key in got:
            _assert_equal(got[key], expected[key])
    elif isinstance(got, list | tuple):
        assert len(got) == len(expected)
        for mine, theirs in zip(got, expected, strict=True):
            _assert_equal(mine, theirs)
    else:
        assert got == expected


def test_the_keys_of_a_state():
    with trainer(Everything, scheduler_step_freq="epoch") as one:
        one.train(num_steps=5)
        one.validate(num_steps=2)
        state = one.state_dict()
    assert {"epoch", "operator", "models", "optimizers", "schedulers"} <= state.keys()
    assert state["epoch"] == 2
    place = {"is_over": False, "samples_per_step": 6, "epoch_size": (22, 22)}
    assert state["position"] == {
        "train": {"epoch": 1, "step": 1, **place},
        "validation": {"epoch": 0, "step": 2, **place},
    }
    assert list(state["criterion"]) == ["scale"]
    assert not any(key.startswith("module.") for key in state["models"][0])


def test_layout_versions_of_modules_travel():
    with trainer(Everything, scheduler_step_freq="epoch") as one:
        (saved,) = one.state_dict()["models"]
        assert saved._metadata["1"] == one.get_model().state_dict()._metadata["1"]


@pytest.mark.parametrize("reproducible", [False, True])
def test_seed_and_shards_come_from_the_state(reproducible):
    arguments = {"config": {BATCH_SIZE: 6, **SHUFFLED}, "reproducible": reproducible}
    with trainer(**arguments, seed=11, num_shards=3) as one:
        one.train(num_steps=2)
        state = one.state_dict()
        one.train(num_steps=7)
        expected = weights(one.get_model())
    with trainer(**arguments) as one:
        one.load_state_dict(state)
        assert one.state_dict()["seed"] == 11
        assert one.state_dict()["num_shards"] == 3
        one.train(num_steps=7)
        assert torch.equal(weights(one.get_model()), expected)


@pytest.mark.parametrize("other", [{"seed": 5}, {"seed": 0}, {"num_shards": 2}])
def test_another_explicit_seed_or_number_of_shards_is_refused(other):
    with trainer(seed=11, num_shards=3) as one:
        state = one.state_dict()
    (name,) = other
    with trainer(**other) as one:
        with pytest.raises(CheckpointError, match=f"leave {name} out"):
            one.load_state_dict(state)
        assert one.train()["batch_count"] > 0


def test_get_model_is_a_plain_copy():
    with trainer() as one:
        model = one.get_model()
        one.train()
        trained = one.get_model()
    assert torch.equal(weights(model), weights(linear()))
    assert same(weights(trained), by_hand(4))
    assert trained.weight.grad is None
    assert trained.weight.requires_grad
    assert not trained.weight._post_accumulate_grad_hooks
    copy.deepcopy(trained)(torch.ones(1, 3, dtype=torch.float64)).sum().backward()


# ---------------------------------------------------------------- what cannot be taken over


class Wider(Regression):
    def setup(self, config):
        model = nn.Linear(3, 5, dtype=torch.float64)
        self.register(models=model, optimizers=sgd(model))


class TwoModels(Regression):
    def setup(self, config):
        models = [linear(), linear()]
        self.register(models=models, optimizers=[sgd(model) for model in models])


class TwoGroups(Regression):
    def setup(self, config):
        model = linear()
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        self.register(models=model, optimizers=torch.optim.SGD(groups, lr=1))


def stepped_by(optimizer_cls):
    class Stepped(Regression):
        def setup(self, config):
            model = linear()
            optimizer = optimizer_cls(model.parameters(), lr=0.1)
            self.register(models=model, optimizers=optimizer, criterion=nn.MSELoss())
            self.register_data(train_loader=loader())

    return Stepped


def state_of(operator):
    with trainer(operator) as one:
        return one.state_dict()


def of_an_earlier_version(state):
    state.pop("optimizer_classes", None)
    return state


@pytest.mark.parametrize(
    ("make_state", "named"),
    [
        (lambda: state_of(Wider), "'weight' has shape (5, 3) there, (2, 3) here"),
        (lambda: state_of(TwoModels), "it holds 2 models, the operator registered 1"),
        (lambda: state_of(TwoGroups), "parameter groups of sizes [1, 1] there, [2] here"),
        (dict, "it holds 0 models"),
        (lambda: {"models": [1], "optimizers": [2]}, "its models are no list"),
        (lambda: {"models": 3, "optimizers": "x"}, "its optimizers are no list"),
        (lambda: {**state_of(Regression), "optimizers": [{}]}, "of sizes [] there, [2] here"),
        (lambda: [1], "what trainer.state_dict() returned"),
        (lambda: linear().state_dict(), "load it in setup, before register"),
        (lambda: state_of(stepped_by(torch.optim.Adam)), "optimizer 0 is Adam there, SGD here"),
        (
            lambda: of_an_earlier_version(state_of(stepped_by(torch.optim.Adam))),
            "optimizer 0 lacks 'dampening', of SGD",
        ),
        (
            lambda: {**state_of(Regression), "ema": 3},
            "its averages (ema) are no list",
        ),
        (lambda: {**state_of(Regression), "criterion": 7}, "its criterion is no state_dict"),
        (lambda: {**state_of(Regression), "global_step": "x"}, "its global_step is no number"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(make_state, named):
    state = make_state()
    with trainer() as one:
        one.train(num_steps=3)
        with pytest.raises(CheckpointError) as caught:
            one.load_state_dict(state)
        assert named in str(caught.value)
        one.train(num_steps=5)
        assert same(weights(one.get_model()), by_hand(8))


def test_an_optimizer_with_the_same_options_and_another_step_is_refused():
    """Loaded, Adam would decay weights as AdamW does: a switch in its groups decides that."""
    state = state_of(stepped_by(torch.optim.AdamW))
    with trainer(stepped_by(torch.optim.Adam)) as one:
        with pytest.raises(CheckpointError, match="optimizer 0 is AdamW there, Adam here"):
            one.load_state_dict(state)
        assert one.train()["batch_count"] == 4


def test_a_state_of_another_version_of_torch_is_taken():
    """Which lacks switches that this one has, and has one of its own."""
    with trainer() as one:
        one.train(num_steps=3)
        state = of_an_earlier_version(one.state_dict())
    (group,) = state["optimizers"][0]["param_groups"]
    for switch in ("nesterov", "maximize", "foreach", "differentiable", "fused"):
        del group[switch]
    group |= {"initial_lr": 0.1, "a_later_switch": False}
    with trainer() as one:
        one.load_state_dict(state)
        one.train(num_steps=5)
        assert same(weights(one.get_model()), by_hand(8))


def test_a_state_of_ones_own_that_cannot_be_copied_is_named():
    class Locked(Regression):
        def state_dict(self):
            return {"lock": threading.Lock()}

    with trainer(Locked) as one, pytest.raises(ConfigurationError, match=r"Locked\.state_dict"):
        one.state_dict()


class FailsToLoad(Everything):
    """Its own `load_state_dict` fails once everything else has been taken over."""

    def load_state_dict(self, state):
        if state.get("poison"):
            raise KeyError("poison")
        super().load_state_dict(state)


def test_a_failure_in_the_middle_of_loading_is_undone():
    arguments = {"operator": FailsToLoad, "scheduler_step_freq": "batch"}
    with trainer(**arguments) as one:
        one.train(num_steps=9)
        expected = everything(one)
    with trainer(**arguments) as one:
        poisoned = {**one.state_dict(), "operator": {"poison": True}}
        one.train(num_steps=5)
        with pytest.raises(KeyError, match="poison"):
            one.load_state_dict(poisoned)
        one.train(num_steps=4)
        got = everything(one)
    assert got[1] == expected[1]
    _assert_equal(got[0], expected[0])


def test_files_that_cannot_be_loaded_change_nothing(tmp_path):
    with trainer() as one:
        path = one.save(tmp_path / "run.pt")
        assert path == str(tmp_path / "run.pt")
        whole = (tmp_path / "run.pt").read_bytes()
        (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
        torch.save({"weights": 1}, tmp_path / "foreign.pt")
        one.train(num_steps=2)
        for name in ("cut.pt", "foreign.pt"):
            with pytest.raises(CheckpointError):
                one.load(tmp_path / name)
        with pytest.raises(FileNotFoundError) as caught:
            one.load(tmp_path / "missing.pt")
        assert isinstance(caught.value, CheckpointNotFoundError)
        one.train(num_steps=6)
        assert same(weights(one.get_model()), by_hand(8))


def test_a_load_that_does_not_block_is_refused():
    with trainer() as one, pytest.raises(ValueError, match="blocking"):
        one.load_state_dict(one.state_dict(), blocking=False)


def test_a_state_without_schedulers_is_loaded_where_none_is_registered():
    with trainer() as one:
        one.train()
        state = one.state_dict()
        del state["schedulers"]
        one.train()
        one.load_state_dict(state)
        assert same(weights(one.get_model()), by_hand(4))

    refused = pytest.raises(CheckpointError, match="0 schedulers, the operator registered 1")
    with trainer(Everything, scheduler_step_freq="manual") as one, refused:
        one.load_state_dict({k: v for k, v in one.state_dict().items() if k != "schedulers"})


def test_a_state_that_raysgd_saved_goes_on(tmp_path):
    """Its keys, and the file as RaySGD's `save` wrote it."""
    model = linear(seed=3)
    optimizer = sgd(model)
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    state = {
        "epoch": 3,
        "operator": None,
        "models": [model.state_dict()],
        "optimizers": [optimizer.state_dict()],
    }
    torch.save(state, tmp_path / "raysgd.pt")
    with trainer() as one:
        with pytest.raises(CheckpointError, match=r"RaySGD saved: `trainer\.load_state_dict\("):
            one.load(tmp_path / "raysgd.pt")
        one.load_state_dict(torch.load(tmp_path / "raysgd.pt", weights_only=True))
        assert weights(one.get_model()).equal(weights(model))
        assert len(one.state_dict()["optimizers"][0]["state"]) == 2
        assert one.train()["epoch"] == 4


# ------------------------------------------------------- what is no training changes the state


class Plateau(Regression):
    """Its learning rate halves with each call of `update_scheduler`."""

    def setup(self, config):
        model = linear()
        optimizer = sgd(model)
        scheduler = ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=scheduler
        )
        self.register_data(train_loader=loader(), validation_loader=loader())


class StepsInValidation(Plateau):
    """What its `validate` changes is no state of its own: a scheduler, and a weight."""

    def validate(self, iterator, info):
        result = super().validate(iterator, info)
        self.scheduler.step(-math.inf)
        with torch.no_grad():
            self.model.bias.mul_(0.5)
        return result


class AddsMetric(Plateau):
    """A batch of a validation leaves nothing behind that is saved."""

    def validate_batch(self, batch, batch_info):
        return {**super().validate_batch(batch, batch_info), "metric": 1.0}


def rate(one):
    return one.state_dict()["optimizers"][0]["param_groups"][0]["lr"]


def step_scheduler(one):
    one.update_scheduler(-one.validate()["val_loss"] - one.status()["epochs_finished"])


def halve_rate(operator):
    operator.optimizer.param_groups[0]["lr"] /= 2


KEPT = weakref.WeakKeyDictionary()


def kept_operator(one):
    """As a program holds it that has asked for it once."""
    if one not in KEPT:
        KEPT[one] = weakref.ref(one.get_local_operator())
    return KEPT[one]()


CHANGES = [
    (Plateau, step_scheduler),
    (Plateau, lambda one: one.apply_all_operators(halve_rate)),
    (Plateau, lambda one: halve_rate(one.get_local_operator())),
    (Plateau, lambda one: halve_rate(kept_operator(one))),
    (StepsInValidation, lambda one: one.validate()),
]


def plateau(folder=None, operator=Plateau, **arguments):
    disk = {} if folder is None else {"checkpoint_dir": folder, "resume": "auto"}
    return trainer(operator, scheduler_step_freq="manual", **disk, **arguments)


def epochs(one, last, change):
    while one.status()["epochs_finished"] < last:
        one.train()
        change(one)


@pytest.mark.parametrize(("operator", "change"), CHANGES)
@pytest.mark.parametrize("every", [2, 3, 4])
def test_what_changes_the_state_of_a_checkpoints_step_is_in_the_checkpoint(
    tmp_path, operator, change, every
):
    with plateau(None, operator) as one:
        epochs(one, 4, change)
        expected, expected_rate = weights(one.get_model()), rate(one)
    with plateau(tmp_path, operator, checkpoint_every=every) as one:
        epochs(one, 2, change)
    killed = plateau(tmp_path, operator, checkpoint_every=every)
    epochs(killed, 3, change)
    killed.train(num_steps=1)  # a step of the next epoch, before that has a checkpoint
    killed.shutdown(force=True)
    with plateau(tmp_path, operator, checkpoint_every=every) as one:
        epochs(one, 4, change)
        assert torch.equal(weights(one.get_model()), expected)
        assert rate(one) == expected_rate


def test_what_was_changed_behind_a_checkpoint_is_replayed_from_it(tmp_path):
    with plateau(tmp_path, checkpoint_every=4) as one:
        epochs(one, 2, step_scheduler)
        one.train()
        report = one.replay(10)
        assert report.same_bits
        assert report.start.endswith("step-0000000008.ckpt")


@pytest.mark.parametrize("operator", [Plateau, AddsMetric])
def test_no_checkpoint_is_written_again_where_nothing_may_have_changed(tmp_path, operator):
    newest, elsewhere = tmp_path / "step-0000000004.ckpt", tmp_path / "elsewhere.pt"
    with plateau(tmp_path, operator, checkpoint_every=4) as one:
        one.train()
        written = newest.stat().st_ino
        one.validate()
        one.predict(loader())
        one.save(elsewhere)
        one.train(num_steps=1)
        one.apply_all_operators(halve_rate)  # the next checkpoint has it, and this one must not
    with plateau(tmp_path, operator, checkpoint_every=4) as one:
        one.train(num_steps=1)
    assert newest.stat().st_ino == written
    assert [*tmp_path.glob("step-*")] == [newest]
