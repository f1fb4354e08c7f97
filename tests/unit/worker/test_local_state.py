# SPDX-License-Identifier: Apache-2.0
"""The tensors that `lockstep.local` marks, taken out of a state and put into another rank's."""

import copy

import pytest
import torch
from tests.unit.trainer.programs import Regression, loader, trainer
from torch import nn

import lockstep
from lockstep.operator.registration import registered_parts
from lockstep.worker.step_records import weight_names


class Routed(Regression):
    """A model and a criterion with a part of their own each, and an optimizer of all."""

    def setup(self, config):
        torch.manual_seed(config["seed"])
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
        criterion = nn.Linear(1, 1).double()
        criterion.forward = lambda output, target: (
            (output * criterion.weight - target).square().mean()
        )
        lockstep.local(model[1]), lockstep.local(criterion.weight)
        parameters = [*model.parameters(), *criterion.parameters()]
        self.model, self.optimizer, self.criterion, self.ema = self.register(
            models=model,
            optimizers=torch.optim.Adam(parameters, lr=0.1),
            criterion=criterion,
            ema=0.5,
        )
        self.register_data(train_loader=loader())


@pytest.mark.parametrize("seed", [0, 1])
def test_a_state_of_two_ranks_gives_each_its_own(seed):
    """One process stands for rank 0 of one: what it takes from a list of one is its own."""
    with trainer(Routed, config={"seed": seed}) as run:
        run.train()
        state = run.state_dict()
    local = state["local"]
    model = state["models"][0]
    assert set(local["models"][0]) == {name for name in model if name.startswith("1.")}
    assert set(local["criterion"]) == {"weight"}
    # Weight and bias of the norm, and the criterion's weight: parameters 2, 3 and 6.
    assert set(local["optimizers"][0]) == {2, 3, 6}
    for name, value in local["models"][0].items():
        assert torch.equal(value, model[name])


def test_what_is_loaded_is_the_rank_s_own_and_not_what_lies_among_the_shared_values():
    with trainer(Routed, config={"seed": 0}) as run:
        run.train()
        state = run.state_dict()
        averages = {f"module.{key}" for key in state["local"]["models"][0]}
        assert set(state["local"]["ema"][0]) == averages
        other = {key: value + 1 for key, value in state["local"]["models"][0].items()}
        own = {**state["local"], "models": [other]}
        run.load_state_dict({**state, "local_by_rank": [own]})
        model = run.get_model()
        for name, value in other.items():
            assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(model[0].weight, state["models"][0]["0.weight"])
        run.load_state_dict({**state, "local_by_rank": [own, own]})
        for name, value in run.get_model().state_dict().items():
            assert torch.equal(value, state["models"][0][name])


def test_what_is_not_local_here_stays_that_of_all_ranks():
    """A file of a program that had marked more."""
    with trainer(Routed, config={"seed": 0}) as run:
        run.train()
        state = run.state_dict()
        own = copy.deepcopy(state["local"])
        own["models"][0] |= {"0.weight": torch.zeros(3, 3, dtype=torch.float64)}
        own["optimizers"][0] |= {0: {"step": torch.tensor(99.0)}}
        run.load_state_dict({**state, "local_by_rank": [own]})
        assert torch.equal(run.get_model()[0].weight, state["models"][0]["0.weight"])
        assert run.state_dict()["optimizers"][0]["state"][0]["step"] == 4


def test_a_rank_that_has_no_state_for_its_own_parameter_gets_none():
    with trainer(Routed, config={"seed": 0}) as run:
        fresh = run.state_dict()["local"]
        assert fresh["optimizers"][0] == {2: None, 3: None, 6: None}
        run.train()
        state = run.state_dict()
        own = {**state["local"], "optimizers": fresh["optimizers"]}
        run.load_state_dict({**state, "local_by_rank": [own]})
        assert run.state_dict()["optimizers"][0]["state"].keys() == {0, 1, 4, 5}


class Cell(nn.Linear):
    """Each forward puts another tensor in the place of a buffer, and fills one that was None."""

    def __init__(self):
        super().__init__(3, 2, dtype=torch.float64)
        self.register_buffer("h", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("last", None)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        y = super().forward(x) + self.h
        self.h, self.last = y[0].detach(), y[-1].detach()
        self.calls = self.calls + 1
        return y


class Recurrent(Regression):
    def setup(self, config):
        self.model = Cell()
        lockstep.local(self.model.h if config["marks"] == "h" else self.model)
        self.optimizer, self.criterion = torch.optim.SGD(self.model.parameters(), 0.1), nn.MSELoss()
        *_, self.ema = self.register(
            models=self.model, optimizers=self.optimizer, criterion=self.criterion, ema=0.5
        )
        self.register_data(train_loader=loader())


BUFFERS = {"h": {"h"}, "module": {"h", "last", "calls"}}


@pytest.mark.parametrize("marks", [*BUFFERS])
def test_a_buffer_that_forwards_replace_or_fill_stays_the_rank_s_own(marks):
    with trainer(Recurrent, config={"marks": marks}) as run:
        parts, buffers = registered_parts(run.get_local_operator()), BUFFERS[marks]
        assert parts.has_local_tensors
        run.train()
        assert parts.has_local_tensors
        state = run.state_dict()
        assert {"h", "last", "calls"} & state["local"]["models"][0].keys() == buffers
        assert not buffers & {
            name for part in weight_names(run.get_local_operator()) for name in part
        }
        other = {name: state["models"][0][name] + 1 for name in buffers}
        averaged = {f"module.{name}": value + 1 for name, value in other.items()}
    own = {**state["local"], "models": [other], "ema": [averaged]}
    with trainer(Recurrent, config={"marks": marks}) as run:
        run.load_state_dict({**state, "local_by_rank": [own]})
        loaded, average = run.get_model().state_dict(), run.get_averaged_model().state_dict()
    for name in ("h", "last", "calls"):
        assert torch.equal(loaded[name], other.get(name, state["models"][0][name]))
        kept = averaged.get(f"module.{name}", state["ema"][0][f"module.{name}"])
        assert torch.equal(average[name], kept)


def test_a_buffer_that_a_rank_had_not_filled_is_not_filled_by_rank_0s():
    with trainer(Recurrent, config={"marks": "module"}) as run:
        fresh = run.state_dict()["local"]
        assert fresh["models"][0]["last"] is None
        run.train()
        state = run.state_dict()
    with trainer(Recurrent, config={"marks": "module"}) as run:
        run.load_state_dict({**state, "local_by_rank": [fresh]})
        assert run.get_model().last is None


class Tied(Regression):
    """One local parameter under two names."""

    def setup(self, config):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)).double()
        model[1].weight = model[0].weight
        lockstep.local(model[0])
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
        )
        self.register_data(train_loader=loader())


def test_a_tensor_with_two_names_is_the_rank_s_own_under_both():
    with trainer(Tied) as run:
        run.train()
        state = run.state_dict()
        other = {name: value + 1 for name, value in state["local"]["models"][0].items()}
        assert other.keys() == {"0.weight", "0.bias", "1.weight"}
        own = {**state["local"], "models": [other]}
        run.load_state_dict({**state, "local_by_rank": [own]})
        assert torch.equal(run.get_model()[0].weight, other["0.weight"])
