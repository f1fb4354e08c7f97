# SPDX-License-Identifier: Apache-2.0
"""Metrics that are no single number: `lockstep.metrics.metric_values` averages them, or a warning
names them."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE
from lockstep.metrics import AverageMeterCollection, merge, merge_user_results
from lockstep.metrics.merge_over_workers import varying_metrics, varying_results

CLASSES = torch.tensor([0, 1, 2, 2, 1, 0, 2, 2, 2, 1])


def collected(*updates):
    meters = AverageMeterCollection()
    for value, samples in updates:
        meters.update({"m": value}, n=samples)
    return pickle.loads(pickle.dumps(meters.state()))


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_tensors_and_arrays_of_one_shape_are_averaged_element_by_element(kind):
    """The result held rank 0's last batch."""
    states = [
        collected((kind([1, 2]), 3), (kind([5, 0]), 1)),
        collected((kind([0, 4]), 2)),
    ]
    result = merge(states)
    assert type(result["m"]) is type(kind([1.0]))
    assert result["m"].tolist() == [pytest.approx(8 / 6), pytest.approx(14 / 6)]
    assert result["last_m"].tolist() == [5, 0]
    assert varying_metrics(states) == []
    own = merge_user_results([{"m": kind([1.0, 2.0])}, {"m": kind([4.0, 8.0])}], [1, 2])
    assert own["m"].tolist() == [3, 6]


def test_the_callers_array_may_be_written_to_afterwards():
    for value in (torch.ones(2), np.ones(2)):
        meters = AverageMeterCollection()
        meters.update({"m": value})
        value += 1
        assert meters.summary()["m"].tolist() == meters.summary()["last_m"].tolist() == [1, 1]


LARGE = torch.zeros(257, 256)
SAME = [("a", "a"), ([1, 2], [1, 2]), (None, None), (LARGE, LARGE), (1.0, None)]


class Incomparable:
    def __eq__(self, other):
        raise AttributeError("dtype")

    __hash__ = None


OTHER_VALUES = [
    ("a", "b"),
    ([1], [2]),
    ([torch.ones(2)], [torch.ones(2)]),
    (Incomparable(), Incomparable()),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
]
OTHER_ARRAYS = [
    (torch.ones(2), torch.ones(3)),
    (torch.ones(1), torch.ones(3)),
    (LARGE, LARGE + 1),
    (torch.ones(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64)),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_is_the_same_everywhere_is_passed_through(one, other):
    on_two = [collected((each, 1)) for each in (one, other)]
    for states in ([collected((one, 1), (other, 1))], on_two):
        assert varying_metrics(states) == []
        found = merge(states)["m"]
        assert torch.equal(found, one) if one is LARGE else found == one
    assert varying_results([[{"m": one}, {"m": other}, {}]]) == []


@pytest.mark.parametrize(("one", "other"), OTHER_ARRAYS)
def test_an_array_that_differs_between_batches_or_passes_is_named(one, other):
    assert varying_metrics([collected((one, 1), (other, 1))]) == ["m"]
    assert varying_results([[{"m": one}], [{"m": other}]]) == ["m"]


@pytest.mark.parametrize(("one", "other"), OTHER_VALUES[:-1])
def test_the_latest_of_other_values_is_the_result(one, other):
    """The rates of a schedule, or the file of the best epoch, are the same on all workers."""
    states = [collected((one, 1), (other, 1))]
    states = [*states, *states]
    assert varying_metrics(states) == []
    assert merge(states)["m"] is states[0]["others"]["m"]
    assert varying_results([[{"m": one}, {"m": one}], [{"m": other}, {"m": other}]]) == []


@pytest.mark.parametrize(("one", "other"), OTHER_ARRAYS + OTHER_VALUES)
def test_what_differs_between_workers_is_named(one, other):
    assert varying_results([[{"m": one}, {"m": other}]]) == ["m"]
    states = [collected((each, 1)) for each in (one, other)]
    assert varying_metrics(states) == ["m"]
    assert "m" in merge(states)


class Confusion(TrainingOperator):
    def setup(self, config):
        model = nn.Linear(1, 1)
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        data = DataLoader(TensorDataset(torch.ones(10, 1), CLASSES), config[BATCH_SIZE])
        self.register_data(train_loader=data, validation_loader=data)

    def compute_loss(self, batch, batch_info):
        x, y = batch
        counts = torch.bincount(y, minlength=3) / len(y)
        return self.model(x).mean(), {"share": counts, "name": "x", **self.further(y)}

    def further(self, y):
        return {}


class Predicts(Confusion):
    def further(self, y):
        return {"preds": y.tolist()}


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("call", ["train", "validate"])
def test_a_result_is_over_all_batches_and_shards(call, num_shards):
    config = {BATCH_SIZE: 4}
    with TorchTrainer(training_operator_cls=Confusion, num_shards=num_shards, config=config) as one:
        result = getattr(one, call)()
    torch.testing.assert_close(result["share"], torch.bincount(CLASSES) / 10, check_dtype=False)
    assert result["name"] == "x"


@pytest.mark.parametrize("batch", [4, 10])
def test_a_list_that_differs_is_named_with_what_to_write(batch):
    """With ten samples in a batch, of which there is one, its two shards differ."""
    config = {BATCH_SIZE: batch}
    with (
        TorchTrainer(training_operator_cls=Predicts, num_shards=2, config=config) as one,
        pytest.warns(UserWarning, match=r"'preds' is not the same .*register_m") as noted,
    ):
        assert one.train()["preds"]
    assert len(noted) == 1
    with (
        TorchTrainer(training_operator_cls=Predicts, num_shards=2, config=config) as one,
        warnings.catch_warnings(record=True) as noted,
    ):
        warnings.simplefilter("default")
        one.train()
        one.train()
    assert len(noted) == 1


class ByClass(Confusion):
    def further(self, y):
        return {"by_class": {"0": (y == 0).double().mean().item()}, "classes": [0, 1, 2]}


def test_other_values_that_vary_in_a_validation_are_named():
    """Nothing is scheduled there, and the result would be the last batch's alone."""
    with TorchTrainer(training_operator_cls=ByClass, config={BATCH_SIZE: 4}) as one:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            assert one.train()["by_class"] == {"0": 0.0}
        assert not [each for each in noted if "by_class" in str(each.message)]
        with pytest.warns(UserWarning, match="'by_class' is not the same") as noted:
            assert one.validate()["by_class"] == {"0": 0.0}
    assert len(noted) == 1


class Names(Confusion):
    """A loop of one's own that tells the file of its epoch."""

    def train_epoch(self, iterator, info):
        num_batches = len(list(iterator))
        return {"best": f"e{info['epoch_idx']}.pt", "read": num_batches}


def test_a_name_of_each_epoch_is_the_latest_without_a_warning():
    config = {BATCH_SIZE: 10}
    with (
        TorchTrainer(training_operator_cls=Names, config=config) as one,
        warnings.catch_warnings(record=True) as noted,
    ):
        warnings.simplefilter("always")
        result = one.train(num_steps=3)
    assert (result["best"], result["read"]) == ("e2.pt", 1)
    assert not [each for each in noted if "best" in str(each.message)]
