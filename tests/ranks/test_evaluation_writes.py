# SPDX-License-Identifier: Apache-2.0
"""A validation or a prediction whose forwards write leaves every rank as it was.

`lockstep.operator.evaluation_writes` in whole runs. Nine samples in global batches of four: the
third batch has one, which is rank 0's.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness import assert_same, reset, rows
from lockstep import TrainingOperator, local
from lockstep.keys import BATCH_SIZE
from lockstep.worker import LoopRequest, Worker, WorkerSpec
from lockstep.worker.prediction import predict
from ranks.table import as_threads

X, HELD_OUT = rows(9, 4, seed=30), rows(9, 4, seed=31)
TRAIN, VALIDATE = (LoopRequest(purpose, None, False, {}) for purpose in ("train", "validation"))


class Centred(nn.Module):
    """Follows the mean of what it has seen, in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("last", None)

    def forward(self, x):
        if self.training:
            return self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.last = x.detach()[0]
        return self.linear(x - self.mean)


class InPlace(Centred):
    def forward(self, x):
        if not self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x - self.mean)


class Unseen(Centred):
    """Writes without a trace in the tensors' version counters."""

    def forward(self, x):
        if not self.training:
            self.mean.data.add_(x.detach().mean(0))
        return self.linear(x - self.mean)


class Follows(nn.Module):
    """One layer follows another in each forward, as a momentum encoder does."""

    def __init__(self):
        super().__init__()
        self.leading, self.following = (nn.Linear(4, 1).double() for _ in range(2))
        self.following.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.following.weight.lerp_(self.leading.weight, 0.1)
        return self.leading(x) - 2 * self.following(x)


class Op(TrainingOperator):
    def setup(self, config):
        model = reset(config["model"](), 7)
        optimizer = torch.optim.SGD(
            [each for each in model.parameters() if each.requires_grad], 0.1
        )
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        self.register_data(
            train_loader=DataLoader(TensorDataset(X), config[BATCH_SIZE]),
            validation_loader=DataLoader(TensorDataset(HELD_OUT), config[BATCH_SIZE]),
        )

    def compute_loss(self, batch, batch_info):
        return self.model(batch[0]).square().mean()


class OwnBatch(Op):
    def validate_batch(self, batch, batch_info):
        return {"val_loss": self.model(batch[0]).square().mean().item()}


def state(worker):
    return {name: each.clone() for name, each in worker.operator.model.state_dict().items()}


def ran(model, operator_cls, num_workers, calls, num_shards=None):
    """Each rank's states after each of `calls`, with the sums of its metrics."""
    spec = WorkerSpec(
        operator_cls, {BATCH_SIZE: 4, "model": model}, num_workers, num_shards or num_workers, 0
    )

    def one_rank(rank, make_group):
        worker = Worker(spec, rank, rank)
        worker._group = make_group()
        found = []
        try:
            worker._build_operator(torch.device("cpu"))
            for call in calls:
                if call == "predict":
                    told = predict(worker, DataLoader(TensorDataset(HELD_OUT), 4))
                else:
                    told = (worker.train if call is TRAIN else worker.validate)(call)
                found.append((state(worker), told))
            return found
        finally:
            worker.stop()

    results = as_threads(num_workers, one_rank)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


MODELS = [Centred, InPlace, Unseen, Follows]


@pytest.mark.sampled
@pytest.mark.parametrize("evaluates", [VALIDATE, "predict"], ids=["validate", "predict"])
@pytest.mark.parametrize("operator", [Op, OwnBatch])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("num_workers", "num_shards"), [(1, 1), (1, 2), (2, 2)])
def test_it_leaves_the_run_as_it_was(model, operator, num_workers, num_shards, evaluates):
    """Each rank kept what its own samples had made of the model."""
    calls = [TRAIN, evaluates, evaluates, TRAIN]
    results = ran(model, operator, num_workers, calls, num_shards)
    ((undisturbed, _),) = ran(model, operator, 1, [TRAIN, TRAIN], num_shards)[0][1:]
    for found in results:
        (trained, _), (once, _), (twice, _), (after, _) = found
        assert_same(once, trained)
        assert_same(twice, trained)
        assert_same(after, undisturbed)


def predicted(model, num_workers, num_shards):
    """The predictions of all ranks in the order of the data."""
    found = [each[0][1] for each in ran(model, Op, num_workers, ["predict"], num_shards)]
    parts = sorted((one for each in found for one in each), key=lambda one: (one.step, one.shard))
    return torch.cat([one.output for one in parts])


@pytest.mark.parametrize("model", MODELS)
def test_each_batch_is_evaluated_with_the_model_of_the_beginning(model):
    """What a rank evaluated depended on the shards that it had evaluated before."""
    expected = []
    for x in HELD_OUT.split(4):
        one = reset(model(), 7).eval()
        expected.append(one(x).detach())
    assert torch.equal(predicted(model, 1, 1), torch.cat(expected))
    assert torch.equal(predicted(model, 2, 2), predicted(model, 1, 2))


class Remembers(Centred):
    """Its buffer is each rank's own."""

    def __init__(self):
        super().__init__()
        local(self.mean)

    def forward(self, x):
        if not self.training:
            self.mean.add_(1)
        return self.linear(x - self.mean)


def test_what_is_a_ranks_own_goes_on():
    """The second rank has no sample in the third batch."""
    found = [each[1][0]["mean"] for each in ran(Remembers, Op, 2, [TRAIN, VALIDATE])]
    assert [mean.tolist() for mean in found] == [[3.0] * 4, [2.0] * 4]
