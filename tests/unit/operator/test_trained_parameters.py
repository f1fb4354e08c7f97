# SPDX-License-Identifier: Apache-2.0
"""Layers that a run has unfrozen, and given to its optimizer, come back with its state."""

import copy

import pytest
import torch
from tests.ray.surviving import SAM
from tests.unit.trainer.programs import NestedState, linear, loader, sgd, trainer
from torch import nn

import lockstep
from lockstep import TrainingOperator
from lockstep.errors import CheckpointError
from lockstep.worker import load_parts

BEGINS_AT = 3


def _named(model):
    return torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)


def _sharpness_aware(model):
    return SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def _nested(model):
    return NestedState(model.parameters(), lr=0.1, momentum=0.9)


def _nested_and_named(model):
    return NestedState(model.named_parameters(), lr=0.1, momentum=0.9)


class Unfreezes(TrainingOperator):
    """A head trains alone until step 3; then the backbone trains as well, at a rate of its own."""

    def setup(self, config):
        backbone = nn.Linear(3, 3, dtype=torch.float64)
        nn.init.eye_(backbone.weight), nn.init.zeros_(backbone.bias)
        backbone.requires_grad_(False)
        model = nn.Sequential(backbone, linear())
        self.model, self.optimizer = self.register(
            models=model, optimizers=config.get("optimizer", sgd)(model[1])
        )
        self.register_data(train_loader=loader())

    def train_batch(self, batch, batch_info):
        if self.global_step == BEGINS_AT:
            self.model[0].requires_grad_(True)
            params = self.model[0].parameters()
            if "param_names" in self.optimizer.param_groups[0]:
                params = self.model[0].named_parameters()
            self.optimizer.add_param_group({"params": params, "lr": 0.01})
        features, targets = batch
        loss = nn.functional.mse_loss(self.model(features), targets)
        self.optimizer.zero_grad()
        loss.backward()
        if isinstance(self.optimizer, SAM):
            self.optimizer.first_step()
            nn.functional.mse_loss(self.model(features), targets).backward()
            self.optimizer.second_step()
        else:
            self.optimizer.step()
        return {"train_loss": loss.item()}


def _weights(run):
    return run.get_model().state_dict()


def _assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("optimizer", [sgd, _named, _sharpness_aware, _nested, _nested_and_named])
@pytest.mark.parametrize("saved_at", [2, 5])
def test_a_resumed_run_trains_what_the_run_trained(saved_at, optimizer, tmp_path):
    config = {"optimizer": optimizer}
    with trainer(Unfreezes, config=config) as run:
        run.train(num_steps=saved_at)
        path = run.save(tmp_path / "saved")
        run.train(num_steps=4)
        expected = _weights(run)
    with trainer(Unfreezes, config=config) as run:
        run.load(path)
        run.train(num_steps=4)
        _assert_same(_weights(run), expected)


@pytest.mark.parametrize("optimizer", [sgd, _nested])
def test_a_run_goes_back_to_when_a_layer_was_frozen(optimizer):
    with trainer(Unfreezes, config={"optimizer": optimizer}) as run:
        run.train(num_steps=2)
        state = run.state_dict()
        run.train(num_steps=4)
        expected = _weights(run)
        run.load_state_dict(state)
        run.train(num_steps=4)
        _assert_same(_weights(run), expected)


def test_groups_and_flags_are_those_of_the_state():
    with trainer(Unfreezes) as run:
        run.train(num_steps=5)
        late = run.state_dict()
    assert late["trained_parameters"] == {
        "requires_grad": {"0.0.weight": True, "0.0.bias": True},
        "added_groups": [[["0.0.weight", "0.0.bias"]]],
    }
    with trainer(Unfreezes) as run:
        early = run.state_dict()
        assert early["trained_parameters"] == {"requires_grad": {}, "added_groups": [[]]}
        for state, rates, flag in ((late, [0.1, 0.01], True), (early, [0.1], False)):
            run.load_state_dict(state)
            (held,) = run.apply_all_operators(lambda operator: operator)
            assert [group["lr"] for group in held.optimizer.param_groups] == rates
            assert held.model[0].weight.requires_grad is flag


class Begins(Unfreezes):
    """A program for the second stage: its `setup` makes what the first one's loop has added."""

    def setup(self, config):
        super().setup(config)
        self.model[0].requires_grad_(True)
        self.optimizer.add_param_group({"params": self.model[0].parameters(), "lr": 0.01})

    def train_batch(self, batch, batch_info):
        features, targets = batch
        loss = nn.functional.mse_loss(self.model(features), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


@pytest.mark.parametrize("optimizer", [sgd, _nested])
def test_a_group_that_setup_makes_here_is_not_added_once_more(optimizer):
    config = {"optimizer": optimizer}
    with trainer(Unfreezes, config=config) as run:
        run.train(num_steps=5)
        state = run.state_dict()
        run.train(num_steps=3)
        expected = _weights(run)
    with trainer(Begins, config=config) as run:
        run.load_state_dict(state)
        run.train(num_steps=3)
        _assert_same(_weights(run), expected)


def _unfreeze(operator):
    operator.model[0].requires_grad_(True)
    operator.optimizer.add_param_group({"params": operator.model[0].parameters(), "lr": 0.01})


def _given():
    """A model with a frozen backbone, its optimizer, and the operator class around both."""
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), linear())
    nn.init.eye_(model[0].weight), nn.init.zeros_(model[0].bias)
    optimizer = sgd(model[1])
    model[0].requires_grad_(False)
    arguments = {"optimizer": optimizer, "criterion": nn.MSELoss(), "train_loader": loader()}
    return model, optimizer, TrainingOperator.from_model(model, **arguments)


def test_objects_that_were_given_get_the_group_that_was_added_to_their_copies():
    model, optimizer, operator_cls = _given()
    group = optimizer.param_groups[0]
    (copied, _, around_copies) = _given()
    with trainer(around_copies) as run:  # the copies, as workers in other processes have them
        run.train(num_steps=1)
        early = run.state_dict()
        run.apply_all_operators(_unfreeze)
        run.train(num_steps=2)
        late = run.state_dict()
    for _ in range(2):
        load_parts(operator_cls._lockstep_given.run, late)
        _assert_same(model.state_dict(), copied.state_dict())
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert [each["lr"] for each in optimizer.param_groups] == [0.1, 0.01]
        assert optimizer.param_groups[1]["params"][0] is model[0].weight
        assert optimizer.param_groups[0] is group
        assert len(optimizer.state) == 4
    load_parts(operator_cls._lockstep_given.run, early)
    assert not model[0].weight.requires_grad
    assert len(optimizer.param_groups) == 1
    # The workers of a second trainer begin with the trained objects.
    load_parts(operator_cls._lockstep_given.run, late)
    operator_cls._lockstep_given.note_copies()
    with trainer(operator_cls) as run:
        run.train(num_steps=1)
        second = run.state_dict()
    assert second["trained_parameters"] == {"requires_grad": {}, "added_groups": [[]]}
    load_parts(operator_cls._lockstep_given.run, second)
    assert len(optimizer.param_groups) == 2


class Extends(Begins):
    """The loop puts the parameters into a group that is there."""

    def setup(self, config):
        Unfreezes.setup(self, config)
        self.model[0].requires_grad_(True)

    def train_batch(self, batch, batch_info):
        if self.global_step == BEGINS_AT:
            self.optimizer.param_groups[0]["params"].extend(self.model[0].parameters())
        return super().train_batch(batch, batch_info)


def test_a_run_that_has_extended_a_group_loads_its_own_state():
    with trainer(Extends) as run:
        run.train(num_steps=5)
        state = run.state_dict()
        run.train(num_steps=2)
        expected = _weights(run)
        run.load_state_dict(state)
        run.train(num_steps=2)
        _assert_same(_weights(run), expected)


class OfItsOwn(Unfreezes):
    """The layer that is added is each rank's own."""

    def setup(self, config):
        super().setup(config)
        lockstep.local(self.model[0])


def test_states_of_a_rank_s_own_parameters_in_an_added_group_are_the_rank_s():
    with trainer(OfItsOwn) as run:
        run.train(num_steps=5)
        state = run.state_dict()
        own = copy.deepcopy(state["local"])
    assert own["optimizers"][0].keys() == {2, 3}
    for held in own["optimizers"][0].values():
        held["momentum_buffer"].fill_(7.0)
    with trainer(OfItsOwn) as run:
        run.load_state_dict({**state, "local_by_rank": [own]})
        states = run.state_dict()["optimizers"][0]["state"]
        assert [states[number]["momentum_buffer"].unique().tolist() for number in (2, 3)] == [
            [7.0]
        ] * 2


def test_a_state_of_a_version_that_wrote_no_changes_leaves_them_alone():
    with trainer(Unfreezes) as run:
        state = run.state_dict()
        del state["trained_parameters"]
        run.train(num_steps=2)
        run.apply_all_operators(lambda operator: operator.model[0].requires_grad_(True) and None)
        run.load_state_dict(state)
        (flag,) = run.apply_all_operators(lambda operator: operator.model[0].bias.requires_grad)
        assert flag


def test_a_group_of_parameters_that_are_not_here_is_refused_before_anything_changes():
    with trainer(Unfreezes) as run:
        run.train(num_steps=5)
        state, before = run.state_dict(), _weights(run)
        state["trained_parameters"]["added_groups"] = [[["0.9.weight", "0.0.bias"]]]
        with pytest.raises(CheckpointError, match=r"a parameter group holds '0\.9\.weight'"):
            run.load_state_dict(state)
        _assert_same(_weights(run), before)
