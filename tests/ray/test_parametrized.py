# SPDX-License-Identifier: Apache-2.0
"""Models with torch's parametrizations come back from workers as they are there."""

import pickle

import pytest
import torch
from tests.ray.operators import DefaultLoop, farthest, net, problem, sgd
from tests.ray.surviving import digest, trainer_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE
from lockstep.serialization import dumps_or_refuse
from lockstep.testing import Strike


def parametrized():
    model = net()
    parametrizations.weight_norm(model.first)
    parametrizations.spectral_norm(model.second)
    return model


class Parametrized(DefaultLoop):
    def setup(self, config):
        model = parametrized()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))


def trained(**arguments):
    with TorchTrainer(
        training_operator_cls=Parametrized, config={BATCH_SIZE: 12}, **arguments
    ) as run:
        run.train(num_steps=4)
        return run.get_model()


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["replicate", "ddp", "fsdp", "parameter_server"])
def test_two_workers_give_the_model_of_one(sync):
    model, alone = trained(num_workers=2, sync=sync), trained(num_shards=2)
    assert farthest(model, alone) < 1e-12
    assert parametrize.is_parametrized(model.first, "weight")
    features, _ = problem()
    assert torch.allclose(model.eval()(features), alone.eval()(features), rtol=1e-12)
    model.load_state_dict(alone.state_dict())


class Orthogonal(Parametrized):
    """The parametrization holds a buffer that lies in memory column by column."""

    def setup(self, config):
        model = net()
        parametrizations.orthogonal(model.first)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))


@pytest.mark.slow
def test_a_spare_takes_a_buffer_over_as_it_lies():
    arguments = {"config": {BATCH_SIZE: 12}, "num_workers": 2}
    with trainer_of(Orthogonal, **arguments) as run:
        run.train()
        expected = digest(run)
    strikes = [Strike("kill", rank=0, step=2, phase="backward")]
    with trainer_of(Orthogonal, strikes, spare_workers=1, **arguments) as run:
        run.train()
        assert len(run.status()["recoveries"]) == 1
        assert digest(run) == expected


def test_there_and_back():
    model = parametrized().eval()
    back = pickle.loads(dumps_or_refuse([model, model.first], "it"))
    assert back[0].first is back[1]
    features, _ = problem()
    assert torch.equal(back[0](features), model(features))
    # It computes with its own parameters, as ever.
    with torch.no_grad():
        back[0].first.parametrizations.weight.original0.mul_(2)
    assert not torch.equal(back[0](features), model(features))
    parametrize.remove_parametrizations(back[0].first, "weight")
    assert type(back[0].first) is nn.Linear
