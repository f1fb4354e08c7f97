# SPDX-License-Identifier: Apache-2.0
"""A state from the middle of an epoch, in a run with another batch size.

`lockstep.worker.data_cursor` counts the place in an epoch in steps.
"""

import itertools

import pytest
from tests.unit.trainer.programs import Regression, problem, trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.data import BatchParts, ShardAssignment, ShardedLoader
from lockstep.errors import DataOrderError
from lockstep.worker.data_cursor import Cursor

DATA = TensorDataset(*problem())


def cursor_of(size: int) -> Cursor:
    loader = DataLoader(range(22), size)
    return Cursor(ShardedLoader(loader, ShardAssignment(1, range(1), 0), parts=BatchParts.BY_SHARD))


def read_with(
    size: int, state: object, num_steps: int | None = None
) -> tuple[list[float], dict[str, object]]:
    """The first features of the samples that a run with batches of `size` reads, and its state."""
    seen: list[float] = []

    class Notes(Regression):
        def data(self) -> object:
            return DataLoader(DATA, size, shuffle=True)

        def compute_loss(self, batch: object, batch_info: object) -> object:
            seen.extend(batch[0][:, 0].tolist())
            return super().compute_loss(batch, batch_info)

    with trainer(Notes) as one:
        if state is not None:
            one.load_state_dict(state)
        one.train(num_steps=num_steps)
        return seen, one.state_dict()


@pytest.mark.parametrize("size", [1, 3, 4, 12])
def test_an_epoch_goes_on_behind_the_samples_that_were_read(size: int) -> None:
    whole, _ = read_with(6, None)
    begun, state = read_with(6, None, 2)
    rest, _ = read_with(size, state)
    assert begun + rest == whole


def test_an_epoch_whose_last_step_was_made_is_over_in_steps_of_any_size() -> None:
    """A checkpoint may be due with an epoch's last step, and before the epoch ends."""
    cursor = cursor_of(6)
    cursor.load_place({"epoch": 0, "step": 4, "samples_per_step": 6})
    for size in (4, 25):
        other = cursor_of(size)
        other.load_place(cursor.place)
        assert other.ends_before(other.step)


def test_a_place_within_a_step_is_refused_and_nothing_changes() -> None:
    _, state = read_with(6, None, 2)

    class Other(Regression):
        def data(self) -> object:
            return DataLoader(DATA, 5, shuffle=True)

    with trainer(Other) as one:
        one.train(num_steps=1)
        before = one.state_dict()
        with pytest.raises(DataOrderError, match="another global batch size") as caught:
            one.load_state_dict(state)
        assert "behind 12 samples" in str(caught.value)
        assert one.state_dict()["position"] == before["position"]
        assert one.state_dict()["models"][0]["bias"].equal(before["models"][0]["bias"])
        one.load_state_dict({**state, "position": {"train": {"epoch": 1, "step": 0}}})
        assert one.train()["batch_count"] == 5


class StreamOfBatches(IterableDataset):
    def __init__(self, size: int) -> None:
        self.batches = ready(size)

    def __iter__(self) -> object:
        return iter(self.batches)


def ready(size: int) -> list[list[object]]:
    features, targets = problem()
    return [list(both) for both in zip(features.split(size), targets.split(size), strict=True)]


@pytest.mark.parametrize(
    "make", [ready, lambda size: DataLoader(StreamOfBatches(size), batch_size=None)]
)
def test_an_epoch_does_not_go_on_with_ready_batches_of_another_size(make: object) -> None:
    """It would go on behind twice as many samples as were read."""

    def reads(size: int) -> type[Regression]:
        return type("Reads", (Regression,), {"data": lambda self: make(size)})

    with trainer(reads(3)) as one:
        one.train(), one.train(num_steps=2)
        state = one.state_dict()
        one.train()
        expected = one.state_dict()["models"][0]
    with trainer(reads(3)) as same_size:
        same_size.load_state_dict(state)
        assert same_size.train()["num_samples"] == 22 - 2 * 3
        assert same_size.state_dict()["models"][0]["bias"].equal(expected["bias"])
    with trainer(reads(6)) as other:
        other.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(DataOrderError, match="3 samples in the epoch's first batch"):
                other.train()
        at_the_start = {**state, "position": {"train": {"epoch": 1, "step": 0}}}
        other.load_state_dict(at_the_start)
        assert other.train()["num_samples"] == 22


class DrawsSizes(IterableDataset):
    """Batches of another size whenever it is read, as a stream of synthetic samples may have."""

    sizes = itertools.count(2)

    def __iter__(self) -> object:
        return iter(ready(next(self.sizes)))


class Synthetic(Regression):
    def data(self) -> object:
        return DataLoader(DrawsSizes(), batch_size=None)


def test_an_epoch_goes_on_where_a_stream_draws_the_sizes_of_its_batches_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with trainer(Synthetic) as one:
        one.train(num_steps=2)
        state = one.state_dict()
    with trainer(Synthetic) as other:
        other.load_state_dict(state)
        assert other.train(num_steps=2)["batch_count"] == 2
        assert other.status()["step"] == 4
    assert ["in another order" in each.message for each in caplog.records] == [True]
