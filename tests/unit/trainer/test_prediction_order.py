# SPDX-License-Identifier: Apache-2.0
"""`predict` with one worker of several shards: order, structures, and what it leaves alone."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import lockstep
from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import (
    ConfigurationError,
    NotShardableError,
    PeerLostError,
    PerShardLossError,
)
from lockstep.trainer.split_predictions import split_predictions

SAMPLES = 23
FEATURES = torch.arange(SAMPLES * 3.0).reshape(SAMPLES, 3)
DATA = TensorDataset(FEATURES, torch.zeros(SAMPLES, dtype=torch.long))


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.factor * x)


class Predictor(TrainingOperator):
    def setup(self, config):
        self.register(
            models=(model := Doubling()),
            optimizers=torch.optim.SGD(model.parameters()),
            criterion=nn.CrossEntropyLoss(),
        )
        self.register_data(train_loader=DataLoader(DATA, 5))

    def predict_batch(self, batch, batch_info):
        shape = self.config.get("shape")
        return super().predict_batch(batch, batch_info) if shape is None else shape(batch)


@pytest.fixture
def trainer():
    with TorchTrainer(training_operator_cls=Predictor, num_shards=3) as trainer:
        yield trainer


def shaped(function):
    return TorchTrainer(training_operator_cls=Predictor, num_shards=2, config={"shape": function})


class Stream(IterableDataset):
    def __iter__(self):
        return iter(FEATURES)


class ReadyBatches(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return (FEATURES[index * 5 : index * 5 + 5],)


class ReadsLists(torch.utils.data.Dataset):
    """Is asked for a list of samples at once."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, indices):
        return (FEATURES[torch.as_tensor(indices)],)


class NumpyOrder(Sampler):
    def __iter__(self):
        return iter(np.random.permutation(SAMPLES))


def order():
    """A new order of the samples, as a tensor."""
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(2))


LOADERS = {
    "plain": DataLoader(DATA, batch_size=4),
    "shuffled": DataLoader(DATA, batch_size=4, shuffle=True),
    "drop_last": DataLoader(DATA, batch_size=5, shuffle=True, drop_last=True),
    "by batches": DataLoader(
        DATA, batch_sampler=[[2, 1, 0], *([n] for n in range(22, 10, -1)), list(range(3, 11))]
    ),
    "batch sampler": DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 6, False)),
    "by tensors of indices": DataLoader(DATA, batch_sampler=order().split(5)),
    "indices of numpy": DataLoader(DATA, batch_size=4, sampler=NumpyOrder()),
    "tensors as indices": DataLoader(DATA, batch_size=4, sampler=order()),
    "loader workers": DataLoader(DATA, batch_size=4, shuffle=True, num_workers=1),
    "ready batches": DataLoader(ReadyBatches(), batch_size=None, shuffle=True),
    "lists of samples": DataLoader(
        ReadsLists(), batch_size=None, sampler=BatchSampler(RandomSampler(DATA), 2, False)
    ),
    "tensors of samples": DataLoader(ReadsLists(), batch_size=None, sampler=order().split(5)),
    "stream": DataLoader(Stream(), batch_size=4),
    "a list": [(part,) for part in FEATURES.split(7)],
    "tensors": list(FEATURES.split(7)),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_every_sample_once_in_the_order_of_the_dataset(trainer, loader):
    outputs = trainer.predict(loader)
    assert len(outputs) == SAMPLES
    assert torch.equal(torch.stack(outputs), 2 * FEATURES)


def test_a_selection_keeps_the_order_of_its_sampler(trainer):
    chosen = DataLoader(DATA, batch_size=2, sampler=[7, 3, 3, 20, 1])
    assert torch.equal(torch.stack(trainer.predict(chosen)), 2 * FEATURES[[7, 3, 3, 20, 1]])
    some = trainer.predict(DataLoader(DATA, 2, sampler=SubsetRandomSampler([4, 9, 14])))
    assert sorted(row[0].item() for row in some) == [24.0, 54.0, 84.0]
    first = [2, 0, 1]  # each index of a part of the dataset, once
    by_lists = DataLoader(ReadsLists(), batch_size=None, sampler=BatchSampler(first, 2, False))
    for part in (DataLoader(DATA, batch_size=2, sampler=first), by_lists):
        assert torch.equal(torch.stack(trainer.predict(part)), 2 * FEATURES[first])
    drawn = DataLoader(DATA, 2, sampler=WeightedRandomSampler(torch.ones(SAMPLES), 30))
    assert len(trainer.predict(drawn)) == 30
    assert trainer.predict(DataLoader(TensorDataset(FEATURES[:0]), 4)) == []


def test_the_run_stays_as_it_was(trainer):
    trainer.train(num_steps=1)
    operator = trainer.get_local_operator()
    model = operator._lockstep.registered.models[0]
    model.dropout.eval()  # a mode of the user's own
    before, random = trainer.state_dict(), torch.get_rng_state()
    outputs = trainer.predict(LOADERS["shuffled"])
    assert not outputs[0].requires_grad
    assert (model.training, model.dropout.training) == (True, False)
    assert torch.equal(torch.get_rng_state(), random)
    after = trainer.state_dict()
    assert after["position"] == before["position"]
    assert after["global_step"] == before["global_step"]


def test_a_worker_that_is_to_leave_reads_no_further_batch():
    """As after Ctrl-C, or an error on another rank: the next call waits for it."""
    rows = []

    def leave(batch):
        rows.append(len(batch[0]))
        worker.request_leave()
        return batch[0]

    with shaped(leave) as trainer:
        worker = trainer._workers.open_engine()._worker
        with pytest.raises(PeerLostError, match="between two batches"):
            trainer.predict(LOADERS["shuffled"])
    assert len(rows) == 2  # the shards of one batch


@dataclass
class Scored:
    score: torch.Tensor
    label: list


def test_outputs_of_any_structure_come_sample_by_sample():
    def everything(batch):
        x = batch[0]
        return {
            "pair": (x, x.sum(1).numpy()),
            "scored": Scored(x[:, 0], [f"no. {int(row[0])}" for row in x]),
            "boxes": [row[: 1 + int(row[0]) % 2] for row in x],  # a list: one entry a sample
            "source": "digits",
            "nothing": None,
        }

    with shaped(everything) as trainer:
        outputs = trainer.predict(LOADERS["shuffled"])
    assert len(outputs) == SAMPLES
    item, row = outputs[6], FEATURES[6]
    assert torch.equal(item["pair"][0], row)
    assert isinstance(item["pair"], tuple)
    assert isinstance(item["pair"][1], np.float32)
    assert item["scored"] == Scored(torch.tensor(18.0), "no. 18")
    assert torch.equal(item["boxes"], row[:1])
    assert (item["source"], item["nothing"]) == ("digits", None)


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        (lambda batch: batch[0].mean(), "the output"),
        (lambda batch: {"a": (batch[0], batch[0][1:])}, r"the output\['a'\]\[1\]"),
        (lambda batch: [batch[0]], "the output"),
        (lambda batch: object(), "the output"),
    ],
)
def test_what_has_not_a_row_for_each_sample_is_refused(shape, place):
    with shaped(shape) as trainer, pytest.raises(ConfigurationError, match=place):
        trainer.predict(LOADERS["plain"])


def test_a_batch_that_is_not_understood_and_what_is_no_loader(trainer):
    with pytest.raises(ConfigurationError, match="override predict_batch"):
        trainer.predict([{"x": FEATURES}])
    with pytest.raises(NotShardableError):
        trainer.predict(iter([FEATURES]))
    assert trainer.train()["num_samples"] == SAMPLES


def test_only_the_rows_of_a_view_are_kept():
    with shaped(lambda batch: batch[0].new_zeros(len(batch[0]), 10_000)[:, 0]) as trainer:
        outputs = trainer.predict(LOADERS["plain"])
    assert max(each.untyped_storage().nbytes() for each in outputs) < 100


def test_rows_of_named_tuples():
    from collections import namedtuple

    Pair = namedtuple("Pair", "left right")
    assert split_predictions(Pair([1, 2], ["a", "b"]), 2) == [Pair(1, "a"), Pair(2, "b")]
    assert split_predictions(Pair("x", 1), 2) == [Pair("x", 1)] * 2
    assert split_predictions(("x", 1), 2) == ["x", 1]
    with pytest.raises(ConfigurationError, match="a tuple of 2"):
        split_predictions(("x", 1), 3)


def test_each_sample_gets_its_own_of_the_names_that_torch_collates_to_a_tuple():
    """Each one got the names of its whole batch."""
    named = [(row, f"no. {number}") for number, row in enumerate(FEATURES)]
    with shaped(lambda batch: {"name": batch[1], "x": batch[0]}) as trainer:
        outputs = trainer.predict(DataLoader(named, batch_size=4))
    assert [each["name"] for each in outputs] == [name for _, name in named]
    assert all(torch.equal(each["x"], row) for each, row in zip(outputs, FEATURES, strict=True))


class PredictsAmongAll(Predictor):
    joint_loss = True

    def predict_batch(self, batch, batch_info):
        return lockstep.gather(super().predict_batch(batch, batch_info))


def test_a_gather_in_a_prediction_is_not_told_of_a_setting_that_is_there():
    with (
        TorchTrainer(training_operator_cls=PredictsAmongAll, num_shards=2) as trainer,
        pytest.raises(PerShardLossError, match="predict computes shard by shard") as refusal,
    ):
        trainer.predict(LOADERS["plain"])
    assert "joint_loss" not in str(refusal.value)
