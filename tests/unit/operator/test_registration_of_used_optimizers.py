# SPDX-License-Identifier: Apache-2.0
"""`register`, and `from_model` after a call, leave an optimizer as it is: its state, its groups."""

import copy

import torch
from tests.unit.trainer.programs import Regression, linear, loader, trainer
from torch import nn

from lockstep import TrainingOperator
from lockstep.operator import registration
from lockstep.worker import load_parts


class KeepsMasters(torch.optim.SGD):
    """Float32 copies of bfloat16 weights, a mask and a counter, all made with the optimizer."""

    def __init__(self, params):
        super().__init__(params, lr=1e-4, momentum=0.9)
        self.held = self.param_groups[0]
        for param in self.held["params"]:
            master = param.detach().float() + 2.0**-12
            self.state[param] = {"master": master, "mask": master > 0, "count": torch.tensor(3)}


def test_state_and_groups_are_those_of_before():
    class Masters(Regression):
        def setup(self, config):
            model = linear().to(torch.bfloat16)
            self.given = KeepsMasters(model.parameters())
            self.kept = [dict(each) for each in self.given.state.values()]
            self.register(models=model, optimizers=self.given)
            self.register_data(train_loader=loader())

    with trainer(Masters) as one:
        operator = one.get_local_operator()
        for before, now in zip(operator.kept, operator.given.state.values(), strict=True):
            assert {name: id(each) for name, each in now.items()} == {
                name: id(each) for name, each in before.items()
            }
        assert operator.given.param_groups[0] is operator.given.held


def test_state_goes_to_the_device_of_its_parameter():
    """`meta` stands for an accelerator: a step count stays on the host, as torch has it."""
    param = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = {
        "step": torch.tensor(3.0),
        "master": torch.ones(2, dtype=torch.float64),
        "lists": [torch.ones(2), "word"],
    }
    registration._move_state([optimizer])
    state = optimizer.state[param]
    assert state["step"].device.type == "cpu"
    assert (state["master"].device.type, state["master"].dtype) == ("meta", torch.float64)
    assert state["lists"][0].device.type == "meta"
    assert state["lists"][1] == "word"


def test_a_state_of_given_objects_comes_back_as_it_is():
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = KeepsMasters(model.parameters())
    operator = TrainingOperator.from_model(model, optimizer=optimizer, train_loader=loader())
    trained = copy.deepcopy(optimizer.state_dict())
    for state in trained["state"].values():
        state["master"] += 2.0**-13
    state = {"models": [model.state_dict()], "optimizers": [trained]}
    load_parts(operator._lockstep_given.run, state)
    expected = [state["master"] for state in trained["state"].values()]
    for master, now in zip(expected, optimizer.state.values(), strict=True):
        assert torch.equal(now["master"], master)
        assert now["mask"].dtype is torch.bool
        assert now["count"].dtype is torch.int64
    assert optimizer.param_groups[0] is optimizer.held
