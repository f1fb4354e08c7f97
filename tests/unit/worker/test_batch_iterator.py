# SPDX-License-Identifier: Apache-2.0
"""What an epoch's loop of one's own sees of its iterator."""

import pytest
from tests.unit.trainer.programs import (
    BATCH,
    SAMPLES,
    STEPS_PER_EPOCH,
    Regression,
    Streaming,
    linear,
    problem,
    same,
    sgd,
    trainer,
    weights,
)
from torch import nn

EVERY = 3


class StepsAtTheEnd(Regression):
    """Steps after every third batch, and after the last one, which it knows by the length."""

    def train_epoch(self, iterator, info):
        self.optimizer.zero_grad()
        for number, (features, targets) in enumerate(iterator, 1):
            self.criterion(self.model(features), targets).backward()
            if number % EVERY == 0 or number == len(iterator):
                self.optimizer.step()
                self.optimizer.zero_grad()
        return {"batches": float(number)}


def windows_by_hand(passes):
    """Plain autograd; each pass is the batches that it reads."""
    features, targets = problem()
    model = linear()
    optimizer = sgd(model)
    for batches in passes:
        for number, batch in enumerate(batches, 1):
            rows = slice(batch * BATCH, (batch + 1) * BATCH)
            nn.functional.mse_loss(model(features[rows]), targets[rows]).backward()
            if number % EVERY == 0 or number == len(batches):
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize(
    ("calls", "passes"),
    [
        ([None, None], [range(4), range(4)]),
        ([2, None], [range(2), range(2, 4)]),
        ([4, 2], [range(4), range(2)]),
        ([5, 5], [range(4), range(1), range(1, 4), range(2)]),
    ],
)
def test_the_last_batch_is_where_the_length_says(calls, passes):
    with trainer(StepsAtTheEnd) as one:
        for steps in calls:
            one.train(num_steps=steps)
        assert same(weights(one.get_model()), windows_by_hand(passes))


class NotesLengths(Regression):
    def train_epoch(self, iterator, info):
        self.lengths = [len(iterator)] + [len(iterator) for _ in iterator] + [len(iterator)]
        return {}

    def validate(self, val_iterator, info):
        self.lengths = [len(val_iterator) for _ in val_iterator]
        return {}


def test_the_length_does_not_change_in_a_pass():
    with trainer(NotesLengths) as one:
        operator = one.get_local_operator()
        one.train(num_steps=1)
        assert operator.lengths == [1, 1, 1]
        one.train()
        assert operator.lengths == [3] * 5
        one.validate()
        assert operator.lengths == [-(-SAMPLES // BATCH)] * STEPS_PER_EPOCH


class AsksAStream(Streaming):
    def train_epoch(self, iterator, info):
        with pytest.raises(TypeError, match="no length"):
            len(iterator)
        return {"batches": float(sum(1 for _ in iterator))}


def test_a_stream_has_no_length():
    with trainer(AsksAStream) as one:
        assert one.train(num_steps=2)["batch_count"] == 2
