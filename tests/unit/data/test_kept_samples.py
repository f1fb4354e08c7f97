# SPDX-License-Identifier: Apache-2.0
"""The samples of a batch that a loop has made: `lockstep.data.batch_rows.count_kept_samples`."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.data.batch_rows import count_kept_samples
from lockstep.errors import WeightError
from lockstep.keys import NUM_SAMPLES


def ones(*shape):
    return torch.ones(shape)


PAIRS = [(ones(length, 2), torch.tensor(1.0)) for length in (3, 1, 4, 2, 2)]
SEQUENCES = [sequence for sequence, _ in PAIRS]
COLUMNS = (ones(5, 7, 4), ones(5, 1))


@pytest.mark.parametrize(
    ("made", "delivered", "count"),
    [
        # Moved, augmented, or in another order: all samples are there.
        (COLUMNS, COLUMNS, 5),
        ((ones(7, 5, 4), ones(5, 1)), COLUMNS, 5),
        ((ones(7, 5, 4), ones(7, 5)), (ones(5, 7, 4), ones(5, 7)), 5),
        ((ones(2, 5, 4), ones(2, 5)), (ones(5, 2, 4), ones(5, 2)), 5),
        ((ones(9, 5, 4), ones(6, 5)), COLUMNS, 5),
        ({"sigmas": ones(10), "x": ones(5, 2)}, ones(5, 2), 5),
        (ones(1, 5, 2), ones(5, 2), 5),
        ((["a"] * 5, ones(7, 4)), (["a"] * 5, ones(5, 4)), 5),
        ((ones(40, 3), ones(2, 60), ones(5)), (ones(40, 3), ones(2, 70), ones(5)), 5),
        ((ones(40, 3), ones(40)), ones(40, 3), 5),
        # Two views of each sample.
        (ones(10, 2), ones(5, 2), 5),
        ((ones(10, 2), ones(10)), (ones(5, 2), ones(5)), 5),
        # Cut: every tensor says so.
        ((ones(3, 7, 4), ones(3, 1)), COLUMNS, 3),
        ((ones(3, 5), ones(3)), (ones(5, 5), ones(5)), 3),
        ((ones(3, 5, 8, 8), ones(3)), (ones(5, 5, 8, 8), ones(5)), 3),
        (ones(0, 2), ones(5, 2), 0),
        (ones(3, 5), ones(5, 5), 3),
        # Cut, and by chance as many tokens or features as there were samples.
        (ones(3, 5), ones(5, 6), 3),
        ((ones(3, 5), ones(3, 5)), (ones(5, 9), ones(5, 9)), 3),
        ((ones(3, 5), ones(3)), (ones(5, 4), ones(5)), 3),
        # Time first, or several views in front.
        (ones(6, 5), ones(5, 6), 5),
        (ones(3, 5), ones(5, 3), 5),
        (ones(2, 5, 4), ones(5, 4), 5),
        ((ones(2, 5, 4), ones(2, 5)), (ones(5, 4), ones(5)), 5),
        # Beside them one number for all.
        ((ones(3, 4), ones(3), ones(1)), (ones(5, 4), ones(5)), 3),
        ((ones(3, 4), ones(3), ones(1)), (ones(5, 4), ones(5), ones(1)), 3),
        ((ones(1, 4), ones(1, 1)), (ones(5, 4), ones(5, 1)), 1),
        (ones(1, 1), ones(5, 1), 1),
        # Cut rows that were no samples.
        (ones(3, 4), (ones(40, 4), ones(2, 80), ones(5)), None),
        (ones(10, 4), (ones(40, 4), ones(2, 80), ones(5)), None),
        ((ones(0, 2), ones(3)), (ones(5, 2), ones(5)), 3),
        (object(), object(), 5),
        # Some tensors say so, and others not; or more than there are.
        ((ones(3, 7, 4), ones(4, 1)), COLUMNS, None),
        ((ones(10), ones(3, 7)), (ones(5, 7), ones(5)), None),
        (ones(8, 2), ones(5, 2), None),
        # From a list of samples.
        (PAIRS, PAIRS, 5),
        (PAIRS[:3], PAIRS, 3),
        ([(x * 2, y) for x, y in PAIRS[:3]], PAIRS, 3),
        ((ones(5, 4, 2), ones(5)), PAIRS, 5),
        ((ones(4, 5, 2), ones(5)), PAIRS, 5),
        ((ones(3, 4, 2), ones(3)), PAIRS, None),
        ((ones(12, 2), ones(12)), PAIRS, None),
        ((ones(10, 2), ones(10)), PAIRS, None),
        ((ones(5, 4, 2), torch.tensor([3, 1, 4, 2, 2])), SEQUENCES, 5),
        ([each.half() for each in SEQUENCES[:4]], SEQUENCES, 4),
        (tuple(zip(*PAIRS[:2], strict=True)), tuple(zip(*PAIRS, strict=True)), 2),
        ([*SEQUENCES, ones(1, 2)], SEQUENCES, None),
    ],
)
def test_what_a_made_batch_counts(made, delivered, count):
    assert count_kept_samples(made, delivered, 5) == count


def problem():
    draw = torch.Generator().manual_seed(3)
    return (
        torch.randn(8, 7, 4, generator=draw, dtype=torch.float64),
        torch.randn(8, 1, generator=draw, dtype=torch.float64),
    )


class TimeFirst(TrainingOperator):
    """Batches of five and three sequences in one step, of which the LSTM wants time first."""

    def setup(self, config):
        torch.manual_seed(0)
        model = nn.LSTM(4, 1).double()
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.5)
        )
        data = DataLoader(TensorDataset(*problem()), 5)
        self.register_data(train_loader=data, validation_loader=data)

    def loss_of(self, x, y):
        return nn.functional.mse_loss(self.model(x)[0][-1], y)

    def compute_loss(self, batch, batch_info):
        return self.loss_of(*batch)

    def train_batch(self, batch, batch_info):
        return super().train_batch((batch[0].transpose(0, 1), batch[1]), batch_info)

    def validate_batch(self, batch, batch_info):
        return super().validate_batch((batch[0].transpose(0, 1), batch[1]), batch_info)


def test_sequences_with_time_first_count_as_sequences():
    """Both batches counted for their seven steps of time, so the step was a mean of two means."""
    with TorchTrainer(training_operator_cls=TimeFirst, accumulate=2) as one:
        model = one.get_model()
        x, y = problem()
        loss = nn.functional.mse_loss(model(x.transpose(0, 1))[0][-1], y)
        validated = one.validate()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        assert one.train()[NUM_SAMPLES] == validated[NUM_SAMPLES] == 8
        assert validated["val_loss"] == pytest.approx(loss.item(), rel=1e-12)
        for got, true in zip(one.get_model().parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-15)


def test_what_shows_no_count_is_refused():
    class Mixes(TimeFirst):
        """Three sequences of an earlier batch beside those of this one."""

        def train_batch(self, batch, batch_info):
            x, y = (pad_sequence([*each, *each[:3]]).transpose(0, 1) for each in batch)
            return super(TimeFirst, self).train_batch((x, y), batch_info)

    with (
        TorchTrainer(training_operator_cls=Mixes) as one,
        pytest.raises(WeightError, match=r"leading lengths \[8, 8\]"),
    ):
        one.train()
