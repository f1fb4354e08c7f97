# SPDX-License-Identifier: Apache-2.0
"""Losses over the rows of all workers: the weights of one process, at any number of workers."""

import pytest
import torch
from tests.ray.operators import farthest, problem, sgd
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError, CrossedWeightsError, PerShardLossError
from lockstep.keys import BATCH_SIZE
from lockstep.operator import RankContext
from lockstep.operator.batch_refusals import refuse_borrowed_batch

GLOBAL_BATCH = 12
"""37 samples: the fourth batch of an epoch is one sample, so three of four workers borrow."""


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        self.right = nn.Linear(2, 4).double()
        self.log_scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, left, right):
        return functional.normalize(self.left(left)), functional.normalize(self.right(right))


def towers():
    torch.manual_seed(0)
    return Towers()


def clip(a, b, scale):
    similar = scale * a @ b.T
    labels = torch.arange(len(a))
    return (
        functional.cross_entropy(similar, labels) + functional.cross_entropy(similar.T, labels)
    ) / 2


class Contrastive(TrainingOperator):
    joint_loss = True

    def setup(self, config):
        self.model, self.optimizer = self.register(
            models=(model := towers()), optimizers=sgd(model)
        )
        loader = DataLoader(TensorDataset(*problem()), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)

    def compute_loss(self, batch, batch_info):
        a, b = self.model(*batch)
        return lockstep.info_nce(a, b, self.model.log_scale.exp())


class Gathered(Contrastive):
    def compute_loss(self, batch, batch_info):
        a, b = map(lockstep.gather, self.model(*batch))
        return clip(a, b, self.model.log_scale.exp())


class OwnStep(Contrastive):
    joint_loss = False
    plain = False

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        a, b = map(lockstep.gather, self.model(*batch))
        loss = clip(a, b, self.model.log_scale.exp())
        loss.backward() if self.plain else self.backward(loss)
        self.optimizer.step()
        return {"train_loss": loss.item()}


class PlainStep(OwnStep):
    plain = True


class PerShard(Gathered):
    joint_loss = False


class AddedUp(Contrastive):
    loss_reduction = "sum"


def batches():
    left, right = problem()
    return zip(left.split(GLOBAL_BATCH), right.split(GLOBAL_BATCH), strict=True)


def mean(losses):
    """Over the samples of an epoch."""
    sizes = [len(left) for left, _ in batches()]
    return sum(n * loss for n, loss in zip(sizes, losses, strict=True)) / sum(sizes)


def one_process():
    model = towers()
    optimizer = sgd(model)
    losses = []
    for rows in [*batches(), *batches()]:
        optimizer.zero_grad()
        loss = clip(*model(*rows), model.log_scale.exp())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return model, losses


def trainer_of(operator, num_workers, global_batch=GLOBAL_BATCH, **arguments):
    return TorchTrainer(
        training_operator_cls=operator,
        num_workers=num_workers,
        num_shards=4,
        config={BATCH_SIZE: global_batch},
        **arguments,
    )


def trained(operator, num_workers):
    with trainer_of(operator, num_workers) as trainer:
        losses = [trainer.train()["train_loss"] for _ in range(2)]
        # The default `validate_batch` goes shard by shard, unless the loss is a joint one.
        validated = trainer.validate()["val_loss"] if operator.joint_loss else None
        return trainer.get_model(), losses, validated


@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "operator",
    [
        Contrastive,
        pytest.param(Gathered, marks=pytest.mark.slow),
        pytest.param(OwnStep, marks=pytest.mark.slow),
    ],
)
def test_the_weights_of_one_process(operator, num_workers):
    model, losses, validated = trained(operator, num_workers)
    true, true_losses = one_process()
    assert farthest(model, true) <= 1e-12
    assert losses == pytest.approx([mean(true_losses[:4]), mean(true_losses[4:])], rel=1e-10)
    if operator.joint_loss:
        of_batches = [clip(*true(*rows), true.log_scale.exp()).item() for rows in batches()]
        assert validated == pytest.approx(mean(of_batches), rel=1e-10)


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_shard_is_not_the_global_batch(num_workers):
    with (
        trainer_of(PerShard, num_workers) as trainer,
        pytest.raises(PerShardLossError, match=r"\[LS112\][\s\S]*joint_loss = True"),
    ):
        trainer.train()


def test_a_validation_shard_by_shard_is_not_either():
    class Validated(OwnStep):
        def compute_loss(self, batch, batch_info):
            return lockstep.global_mean(self.model(*batch)[0])

    with trainer_of(Validated, 1) as trainer, pytest.raises(PerShardLossError):
        trainer.validate()


def test_plain_backwards_of_workers_with_unequal_batches():
    """21 over 4 shards are 6, 5, 5, 5."""
    with (
        trainer_of(PlainStep, 2, global_batch=21) as trainer,
        pytest.raises(CrossedWeightsError, match=r"self\.backward\(loss\)"),
    ):
        trainer.train(num_steps=1)


@pytest.mark.slow
def test_plain_backwards_of_workers_with_equal_batches():
    with trainer_of(PlainStep, 2) as trainer:
        trainer.train(num_steps=3)
        model = trainer.get_model()
    true = towers()
    optimizer = sgd(true)
    for rows in list(batches())[:3]:
        optimizer.zero_grad()
        clip(*true(*rows), true.log_scale.exp()).backward()
        optimizer.step()
    assert farthest(model, true) <= 1e-12


def test_global_losses_are_not_added_up():
    with (
        trainer_of(AddedUp, 1) as trainer,
        pytest.raises(ConfigurationError, match='loss_reduction="sum"'),
    ):
        trainer.train()


class Normed(TrainingOperator):
    """Batch statistics that are shared between workers."""

    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.SyncBatchNorm(3), nn.Linear(3, 2)).double()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        loader = DataLoader(TensorDataset(*problem()), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)


class JointlyNormed(Normed):
    joint_loss = True


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_batch_statistics_of_one_shard(num_workers):
    with trainer_of(Normed, num_workers) as trainer:
        trainer.validate()  # running statistics are nobody's batch
        with pytest.raises(PerShardLossError, match=r"SyncBatchNorm[\s\S]*`1`"):
            trainer.train()


def test_batch_statistics_of_the_whole_batch_on_one_worker():
    with trainer_of(JointlyNormed, 1) as trainer:
        trainer.train(num_steps=1)
        model = trainer.get_model()
    rows = problem()[0][:GLOBAL_BATCH]
    torch.manual_seed(0)
    first = nn.Linear(5, 3).double()
    mean = first(rows).mean(0).detach()
    assert torch.allclose(model[1].running_mean, 0.1 * mean, rtol=1e-12)


def test_statistics_never_count_borrowed_rows():
    operator = JointlyNormed({BATCH_SIZE: 4}, RankContext(world_size=2))
    operator.setup(operator.config)
    try:
        with pytest.raises(PerShardLossError, match="rows of another worker"):
            refuse_borrowed_batch(operator)
        operator.model.eval()
        operator._lockstep.begin_call("validation")
        refuse_borrowed_batch(operator)
    finally:
        operator._lockstep.sync.detach()
