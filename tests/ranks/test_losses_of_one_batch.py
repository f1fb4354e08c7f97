# SPDX-License-Identifier: Apache-2.0
"""Several backwards of one batch in a window of `no_sync`: the batch counts once in its mean."""

import pytest
import torch

from harness import reset
from lockstep.errors import WeightError
from ranks.table_operators import mlp, sgd
from ranks.test_own_loops import FEATURES, PER_BATCH, OwnRows, on_workers


def losses_of(model, features):
    output = model(features)
    return output.square().mean(), 3 * output.mean()


class TwoLosses(OwnRows):
    """An optimizer's step for each batch, which has two losses with a backward for each."""

    def train_batch(self, batch, info):
        (features,) = batch
        self.optimizer.zero_grad()
        self.both(features)
        self.optimizer.step()
        return {}

    def both(self, features):
        with self.no_sync():
            self.backward(losses_of(self.model, features)[0])
        self.backward(losses_of(self.model, features)[1])


class EachReduced(TwoLosses):
    """Without a window the gradients of both add up."""

    def both(self, features):
        for place in range(2):
            self.backward(losses_of(self.model, features)[place])


class Summed(TwoLosses):
    def both(self, features):
        self.backward(sum(losses_of(self.model, features)))


class OfTwoBatches(TwoLosses):
    """A window of two batches, each with one backward."""

    def train_epoch(self, iterator, info):
        for number, (features,) in enumerate(iterator):
            if number % 2 == 0:
                self.optimizer.zero_grad()
                with self.no_sync():
                    self.backward(sum(losses_of(self.model, features)))
            else:
                self.backward(sum(losses_of(self.model, features)))
                self.optimizer.step()
        return {}


class Halves(TwoLosses):
    """Micro-batches of one batch, whose weights the loop says."""

    def both(self, features):
        for place, part in enumerate((features[:1], features[1:])):
            loss = sum(losses_of(self.model, part))
            if place == 0:
                with self.no_sync():
                    self.backward(loss, weight=len(part))
            else:
                self.backward(loss, weight=len(part))


def weights_of(operator):
    return [weight.detach().clone() for weight in operator.model.parameters()]


def oracle(steps, batches_per_step):
    model = reset(mlp(), 7)
    optimizer = sgd(model)
    cut = [features.split(PER_BATCH) for features in FEATURES]
    for step in range(steps):
        optimizer.zero_grad()
        numbers = range(step * batches_per_step, (step + 1) * batches_per_step)
        rows = torch.cat([of_rank[number] for of_rank in cut for number in numbers])
        sum(losses_of(model, rows)).backward()
        optimizer.step()
    return list(model.parameters())


def test_two_losses_of_a_batch_would_count_it_twice():
    """The gradient of their sum would be halved, and with one reduction each it is not."""
    with pytest.raises(WeightError, match="counts once") as caught:
        on_workers(TwoLosses, "train", 1)
    assert "(loss_a + loss_b)" in str(caught.value)


@pytest.mark.parametrize(
    ("operator_cls", "steps", "batches_per_step"),
    [(EachReduced, 3, 1), (Summed, 3, 1), (Halves, 3, 1), (OfTwoBatches, 1, 2)],
)
def test_what_counts_each_batch_once_is_exact(operator_cls, steps, batches_per_step):
    done = on_workers(operator_cls, "train", steps * batches_per_step, then=weights_of)
    for found in done:
        for weight, expected in zip(found, oracle(steps, batches_per_step), strict=True):
            torch.testing.assert_close(weight, expected.detach(), rtol=1e-12, atol=1e-12)
