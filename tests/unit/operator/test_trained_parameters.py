# SPDX-License-Identifier: Apache-2.0
"""Layers that a run has unfrozen, and given to its optimizer, come back with its state."""

import pytest
import torch
from tests.ray.surviving import SAM
from tests.unit.trainer.programs import linear, loader, sgd, trainer
from torch import nn

from lockstep import TrainingOperator
from lockstep.errors import CheckpointError

BEGINS_AT = 3


def _named(model):
    return torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)


def _sharpness_aware(model):
    return SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


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


@pytest.mark.parametrize("optimizer", [sgd, _named, _sharpness_aware])
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


def test_a_run_goes_back_to_when_a_layer_was_frozen():
    with trainer(Unfreezes) as run:
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
