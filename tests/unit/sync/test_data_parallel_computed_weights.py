# SPDX-License-Identifier: Apache-2.0
"""Weights that a hook computes before every forward, from parameters, under data_parallel."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from harness import assert_same, gradients, reset, rows
from lockstep.errors import LostUpdateError
from lockstep.sync import DataParallelModel

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")

X, Y = rows(11, 4, seed=1), rows(11, 3, seed=2)
CPU = torch.device("cpu")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(2, 3, batch_first=True).double()
        for name in ("weight_ih_l0", "weight_hh_l0"):
            weight_norm(self.layer, name)

    def forward(self, x):
        return self.layer(x.unflatten(1, (2, 2)))[0][:, -1]


def layers(change):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    change(model[0])
    return model


MAKES = {
    "pruned": lambda: layers(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
    "pruned twice": lambda: layers(
        lambda layer: [prune.random_structured(layer, "weight", 1, dim=n) for n in (0, 1)]
    ),
    "weight norm": lambda: layers(weight_norm),
    "spectral norm": lambda: layers(spectral_norm),
    "spectral norm, pruned": lambda: layers(
        lambda layer: (prune.l1_unstructured(layer, "bias", 0.5), spectral_norm(layer))
    ),
    "recurrent": Recurrent,
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", MAKES)
def test_it_trains_as_one_model(name, count):
    torch.manual_seed(3)  # spectral_norm draws a vector
    true = MAKES[name]()
    model = MAKES[name]()
    model.load_state_dict(copy.deepcopy(true.state_dict()))
    model = DataParallelModel(model, [CPU] * count)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, 0.9) for each in (true, model)]
    for size in (11, 4, 1, 11):
        for each, optimizer in zip((true, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (each(X[:size]) - Y[:size]).square().sum(1).mean()
            computed = [
                getattr(part, name)
                for part in each.modules()
                for name in ("weight", "weight_hh_l0", "bias")
                if isinstance(getattr(part, name, None), torch.Tensor)
            ]
            (loss + sum(each.square().sum() for each in computed)).backward()
            optimizer.step()
        assert_same(gradients(model.module), gradients(true))
        assert_same(model.module.state_dict(), true.state_dict())
    with torch.no_grad():
        assert torch.allclose(model.eval()(X), true.eval()(X), rtol=1e-12)


class Conditional(nn.Module):
    """Some replicas have no row for the layer whose weight is computed."""

    def __init__(self):
        super().__init__()
        self.first, self.rare = nn.Linear(4, 3).double(), weight_norm(nn.Linear(3, 3).double())

    def forward(self, x):
        hidden = self.first(x)
        few = x[:, 0] > 1.0
        return torch.where(few[:, None], self.rare(hidden), hidden) if few.any() else hidden


@pytest.mark.parametrize("count", [2, 5])
def test_a_layer_that_only_some_replicas_use(count):
    true = reset(Conditional(), 3)
    model = reset(Conditional(), 3)
    wrapped = DataParallelModel(model, [CPU] * count)
    for each in (true, wrapped):
        (each(X) - Y).square().sum(1).mean().backward()
    assert_same(gradients(model), gradients(true))


def test_a_tensor_that_a_hook_computes_from_the_rows_is_refused():
    model = nn.Sequential(nn.Linear(4, 3).double())

    def keep(layer, inputs):
        layer.penalty = layer.weight.sum() * inputs[0].mean()

    model[0].register_forward_pre_hook(keep)
    with pytest.raises(LostUpdateError, match=r"`0\.penalty`"):
        DataParallelModel(model, [CPU] * 2)(X)


def test_a_tensor_that_forward_leaves_is_refused_where_a_hook_runs_too():
    class Leaves(nn.Linear):
        def forward(self, x):
            self.penalty = self.weight.sum()
            return super().forward(x)

    model = nn.Sequential(weight_norm(Leaves(4, 3).double()))
    with pytest.raises(LostUpdateError, match=r"`0\.penalty`"):
        DataParallelModel(model, [CPU] * 2)(X)
