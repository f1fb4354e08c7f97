# SPDX-License-Identifier: Apache-2.0
"""TorchScript's modules are refused by name; they may share the weights of a synchronised model."""

import pytest
import torch
from torch import nn

from harness import assert_same, reset, rows, run_ranks
from lockstep import average_gradients
from lockstep.errors import WrongTypeError
from lockstep.sync import replicate
from unit.trainer.programs import Regression, linear, loader, sgd, trainer

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")

X = rows(8, 4, seed=1)


def net():
    layers = (nn.Linear(4, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 2))
    return reset(nn.Sequential(*layers), seed=2)


@pytest.mark.parametrize("scripted", [torch.jit.script, lambda model: torch.jit.trace(model, X)])
def test_a_scripted_model_is_refused_with_what_to_do(scripted):
    with pytest.raises(WrongTypeError, match=r"the model itself(.|\n)*torch\.compile"):
        replicate(scripted(net()))


def test_a_scripted_part_is_named():
    with pytest.raises(WrongTypeError, match=r"`1`"):
        replicate(nn.Sequential(nn.Linear(4, 4), torch.jit.script(net())))


class Scripted(Regression):
    def setup(self, config):
        model = torch.jit.script(linear())
        self.register(models=model, optimizers=sgd(model), criterion=nn.MSELoss())
        self.register_data(train_loader=loader())


def test_an_operator_is_told_when_it_registers_one():
    with pytest.raises(WrongTypeError, match=r"torch\.jit\.script\(model\) afterwards"):
        trainer(Scripted)


def trained(model, mine, backward, before_step=lambda scripted: None):
    scripted = torch.jit.script(model)
    optimizer = torch.optim.SGD(scripted.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        backward(scripted(mine).square().mean())
        before_step(scripted)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def synchronised(group, mine):
    model = net()
    sync = replicate(model, group=group)
    try:
        return trained(model, mine, lambda loss: sync.backward(loss, weight=len(mine)))
    finally:
        sync.detach()


def averaged(group, mine):
    def average(scripted):
        average_gradients(scripted, weight=len(mine), group=group)

    return trained(net(), mine, torch.Tensor.backward, average)


@pytest.mark.parametrize("way", [synchronised, averaged])
def test_a_scripted_module_trains_the_weights_of_a_model(way):
    alone = trained(net(), X, torch.Tensor.backward)
    for weights in run_ranks(2, lambda group: way(group, X[:5] if group.rank else X[5:])):
        assert_same(weights, alone)
