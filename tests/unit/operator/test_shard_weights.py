# SPDX-License-Identifier: Apache-2.0
"""What a forward writes to weights happens once in a batch, as in one process, or is refused."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import LostUpdateError, NotAvailableError
from lockstep.keys import BATCH_SIZE

SAMPLES, BATCH = 37, 5


def problem():
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64),
        torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64),
    )


class Encoders(nn.Module):
    """One encoder follows another, and the weights of the head keep a norm of one."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.leading, self.following = (nn.Linear(3, 4).double() for _ in range(2))
        self.following.load_state_dict(self.leading.state_dict())
        self.following.requires_grad_(False)
        self.head = nn.Linear(4, 1).double()
        self.how = how

    def forward(self, x):
        if self.training:
            self.write(x)
        return self.head(torch.tanh(self.leading(x)) - 2 * self.following(x))

    @torch.no_grad()
    def write(self, x):
        pairs = zip(self.leading.parameters(), self.following.parameters(), strict=True)
        for leader, follower in pairs:
            if self.how == "data":
                follower.data = follower.data * 0.7 + leader.data * 0.3
            elif self.how == "samples":
                follower.lerp_(x.mean(), 0.1)
            elif self.how == "noise":
                follower.add_(torch.randn_like(follower))
            else:
                follower.lerp_(leader, 0.3)
        if self.how == "normalised":
            self.head.weight.copy_(nn.functional.normalize(self.head.weight))


def sgd(model):
    leading = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(leading, lr=0.1, momentum=0.9)


class Regression(TrainingOperator):
    def setup(self, config):
        self.model = Encoders(config["how"])
        self.optimizer, self.criterion = sgd(self.model), nn.MSELoss()
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))


def one_process(how, accumulate=1, epochs=2):
    """Each batch goes through one forward."""
    features, targets = problem()
    model = Encoders(how)
    optimizer = sgd(model)
    for _ in range(epochs):
        for start in range(0, SAMPLES, BATCH * accumulate):
            end = min(start + BATCH * accumulate, SAMPLES)
            optimizer.zero_grad()
            for begin in range(start, end, BATCH):
                rows = slice(begin, min(begin + BATCH, end))
                loss = nn.functional.mse_loss(model(features[rows]), targets[rows])
                (loss * ((rows.stop - rows.start) / (end - start))).backward()
            optimizer.step()
    return model


def trainer_of(how="in place", operator=Regression, **arguments):
    config = {BATCH_SIZE: BATCH, "how": how}
    return TorchTrainer(training_operator_cls=operator, config=config, **arguments)


def assert_equal_weights(model, other):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("how", ["data", "in place", "normalised"])
def test_a_forward_writes_once_for_all_shards(how, num_shards, accumulate, reproducible):
    arguments = {"num_shards": num_shards, "accumulate": accumulate, "reproducible": reproducible}
    with trainer_of(how, **arguments) as trainer:
        trainer.train()
        trainer.train()
        assert_equal_weights(trainer.get_model(), one_process(how, accumulate))


def test_verify_writes_once_as_well():
    with trainer_of("data", num_shards=4) as trainer:
        trainer.train(num_steps=2)
        assert trainer.verify(num_steps=5).ok


@pytest.mark.parametrize("how", ["samples", "noise"])
def test_what_shards_would_write_differently_is_refused(how):
    with trainer_of(how, num_shards=2) as trainer, pytest.raises(LostUpdateError) as caught:
        trainer.train()
    assert "`following.weight`" in str(caught.value)
    with trainer_of(how) as trainer:
        trainer.train()


class Late(Regression):
    """Nobody keeps copies of all weights by then."""

    def compute_loss(self, batch, batch_info):
        if self.global_step == 5:
            with torch.no_grad():
                self.model.head.bias.zero_()
        return super().compute_loss(batch, batch_info)


def test_a_first_write_after_the_first_steps_is_refused_where_shards_follow():
    with (
        trainer_of(operator=Late, num_shards=2) as trainer,
        pytest.raises(NotAvailableError, match=r"`head\.bias`"),
    ):
        trainer.train()
    with trainer_of(operator=Late) as trainer:
        trainer.train()


class Projected(torch.optim.SGD):
    """From its fifth step on it writes to weights ahead of the forward."""

    num_steps = 0

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.num_steps += 1
        if self.num_steps > 4:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(0.9)


class Projecting(Regression):
    def setup(self, config):
        self.model = Encoders("in place")
        self.optimizer = Projected(self.model.leading.parameters(), lr=0.1)
        self.register(models=self.model, optimizers=self.optimizer, criterion=nn.MSELoss())
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))


def test_what_is_written_ahead_of_all_shards_is_written_once():
    found = []
    for num_shards in (1, 4):
        with trainer_of(operator=Projecting, num_shards=num_shards) as trainer:
            trainer.train()
            found.append(trainer.get_model())
    assert_equal_weights(*found)
