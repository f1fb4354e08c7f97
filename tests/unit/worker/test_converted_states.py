# SPDX-License-Identifier: Apache-2.0
"""States of another form, which what loads them converts: `lockstep.worker.state_refusals`."""

import pytest
import torch
from tests.unit.trainer.programs import Regression, by_hand, linear, loader, same, sgd, trainer
from tests.unit.trainer.programs import weights as weights_of
from torch import nn

from lockstep.errors import CheckpointError


def _old(layer):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer)


class Normed(Regression):
    def setup(self, config):
        model = nn.Sequential(linear(), config["normed"](nn.Linear(2, 2, dtype=torch.float64)))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.fill_(0.5 + 0.1 * number)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=loader())


def _new(layer):
    return nn.utils.parametrizations.weight_norm(layer)


def test_a_state_of_the_weight_norm_of_before_goes_on_in_its_successor(tmp_path):
    with trainer(Normed, config={"normed": _old}) as run:
        run.train(num_steps=3)
        path = run.save(tmp_path / "old")
        run.train(num_steps=3)
        expected = weights_of(run.get_model())
    with trainer(Normed, config={"normed": _new}) as run:
        run.load(path)
        run.train(num_steps=3)
        assert same(weights_of(run.get_model()), expected)
    with trainer(Normed, config={"normed": _new}) as run:  # of the same form as well
        run.train(num_steps=6)
        state = run.state_dict()
        run.train(num_steps=1)
        run.load_state_dict(state)
        assert same(weights_of(run.get_model()), expected)


def test_what_is_outside_of_the_layer_that_converts_is_compared():
    with trainer(Normed, config={"normed": _old}) as run:
        state = run.state_dict()
    state["models"][0]["0.weigth"] = state["models"][0].pop("0.weight")
    refused = pytest.raises(CheckpointError, match=r"lacks '0\.weight'; .* has '0\.weigth'")
    with trainer(Normed, config={"normed": _new}) as run, refused as caught:
        run.load_state_dict(state)
    assert "weight_g" not in str(caught.value)


def test_what_the_layer_cannot_convert_changes_nothing():
    with trainer(Normed, config={"normed": _new}) as run:
        run.train(num_steps=1)
        state = run.state_dict()
        state["models"][0].pop("1.parametrizations.weight.original1")
        state["models"][0]["0.weight"] += 1.0
        run.train(num_steps=1)
        before = weights_of(run.get_model()).clone()
        with pytest.raises(CheckpointError, match=r"Missing key.*original1"):
            run.load_state_dict(state)
        assert torch.equal(weights_of(run.get_model()), before)


class Within(torch.optim.SGD):
    """Keeps its state in a form of its own."""

    def state_dict(self):
        return {"inner": super().state_dict(), "version": 1}

    def load_state_dict(self, state):
        super().load_state_dict(state["inner"])


class OfItsOwnForm(Regression):
    def setup(self, config):
        model = linear()
        optimizer = Within(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        self.register_data(train_loader=loader())


def test_an_optimizer_loads_its_state_in_the_form_in_which_it_has_saved_it(tmp_path):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "resume": "auto"}
    for _ in range(3):
        with trainer(OfItsOwnForm, **arguments) as run:
            run.train(num_steps=2)
            got = weights_of(run.get_model())
    assert same(got, by_hand(6))
