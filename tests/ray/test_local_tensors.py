# SPDX-License-Identifier: Apache-2.0
"""What `lockstep.local` leaves to each rank comes back to that rank, from a file and from parts."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Routed(TrainingOperator):
    """Shared weights, and behind them some that follow the samples of their rank alone."""

    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)).double()
        lockstep.local(model[2])
        shared, own = model[0].parameters(), model[2].parameters()
        optimizers = [torch.optim.Adam(shared, lr=0.01), torch.optim.Adam(own, lr=0.05)]
        self.model, self.optimizers = self.register(
            models=model, optimizers=optimizers, shard=config["shard"]
        )
        features = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)).double()
        data = TensorDataset(features, features.sum(1).sign().long() + 1)
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE]))

    def train_batch(self, batch, batch_info):
        features, classes = batch
        loss = nn.functional.cross_entropy(self.model(features), classes)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return {"train_loss": loss.item()}


class Remembers(Routed):
    """With a state of its own as well."""

    def state_dict(self):
        return {"rank": self.world_rank}

    def load_state_dict(self, state):
        self.loaded = state


def own_weights(trainer):
    return trainer.apply_all_operators(lambda operator: operator.model[2].weight.detach().clone())


def start(operator_cls=Routed, num_workers=2, shard="whole", **arguments):
    return TorchTrainer(
        training_operator_cls=operator_cls,
        num_workers=num_workers,
        config={BATCH_SIZE: 8, "shard": shard},
        **arguments,
    )


SYNCS = [("replicate", "whole"), ("fsdp", "whole"), ("fsdp", [nn.Sequential])]


@pytest.mark.parametrize(("sync", "shard"), SYNCS)
@pytest.mark.parametrize("is_due", [False, True])
@pytest.mark.parametrize("operator_cls", [Routed, Remembers])
def test_each_rank_goes_on_with_its_own(operator_cls, sync, shard, is_due, tmp_path):
    arguments = {"operator_cls": operator_cls, "sync": sync, "shard": shard}
    keeps = {"checkpoint_dir": tmp_path, "checkpoint_every": 3} if is_due else {}
    with start(**arguments, **keeps) as trainer:
        trainer.train(num_steps=3)
        saved = own_weights(trainer)
        if not is_due:
            trainer.save(tmp_path / "saved")
        trainer.train(num_steps=2)
        expected = own_weights(trainer)
    assert not torch.equal(*saved)
    with start(**arguments) as trainer:
        (path,) = tmp_path.glob("step-*" if is_due else "saved")
        trainer.load(path)
        for got, one in zip(own_weights(trainer), saved, strict=True):
            assert torch.equal(got, one)
        trainer.train(num_steps=2)
        for got, one in zip(own_weights(trainer), expected, strict=True):
            assert torch.equal(got, one)


def test_another_number_of_workers_begins_with_those_of_rank_0(tmp_path):
    with start() as trainer:
        trainer.train(num_steps=3)
        first = own_weights(trainer)[0]
        path = trainer.save(tmp_path / "saved")
    with start(num_workers=1) as trainer:
        trainer.load(path)
        assert torch.equal(*own_weights(trainer), first)
