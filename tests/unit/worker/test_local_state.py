# SPDX-License-Identifier: Apache-2.0
"""The tensors that `lockstep.local` marks, taken out of a state and put into another rank's."""

import copy

import pytest
import torch
from tests.unit.trainer.programs import Regression, loader, trainer
from torch import nn

import lockstep


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
