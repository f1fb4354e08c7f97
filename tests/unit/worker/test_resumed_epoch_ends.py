# SPDX-License-Identifier: Apache-2.0
"""A state knows whether its epoch is over: `lockstep.worker.data_cursor` in runs that are resumed.

A stream shows its end only when it is read; and a dataset may have another size in a new process
than when the state was saved. A checkpoint may be due in any step, an epoch's last one as well.
"""

from copy import deepcopy

import pytest
import torch
from tests.unit.trainer.programs import Regression, trainer, weights
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.data import BatchParts, ShardAssignment, ShardedLoader
from lockstep.worker.checkpoint_snapshot import SnapshotTaker
from lockstep.worker.data_cursor import Cursor

EPOCHS = 3


class Rows(Dataset):
    """A curriculum: level e has 8 more rows than the one before."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(32, 3, generator=generator, dtype=torch.float64)
        self.size = 8

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.x[index], self.x[index, :2]


class Stream(Rows, IterableDataset):
    """As many rows, without a length."""

    __len__ = None

    def __iter__(self):
        return (self[n] for n in range(self.size))


class Scheduled(Regression):
    rows = Rows

    def setup(self, config):
        super().setup(config)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def data(self):
        self.rows_now = self.rows()
        return DataLoader(self.rows_now, 4)


class Streamed(Scheduled):
    rows = Stream


def grow(operator, level):
    operator.rows_now.size = 8 * (level + 1)


def run(operator, folder, state=None, *, grows=True):
    """A program as it is started and, with a `state`, started again."""
    arguments = {"checkpoint_dir": folder, "checkpoint_every": 1}
    with trainer(operator, scheduler_step_freq="epoch", **arguments) as one:
        if state is not None:
            one.load_state_dict(state)
        while (epoch := one.status()["epochs_finished"]) < EPOCHS:
            if grows:
                one.apply_all_operators(lambda each, level=epoch: grow(each, level))
            one.train()
        rate = one.get_local_operator().optimizer.param_groups[0]["lr"]
        return one.status()["step"], rate, weights(one.get_model())


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("operator", [Scheduled, Streamed])
def test_a_run_ends_with_the_same_bits_from_each_of_its_checkpoints(
    operator, grows, tmp_path, monkeypatch
):
    """It trained an epoch too many behind a stream's last step, or counted one that went on."""
    states = []
    with monkeypatch.context() as patch:
        # The driver writes the newest one alone where they come faster than the disk takes them.
        patch.setattr(SnapshotTaker, "_keep", lambda _, each: states.append(deepcopy(each.state)))
        steps, rate, undisturbed = run(operator, tmp_path / "whole", grows=grows)
    assert steps == (2 + 4 + 6 if grows else 6)
    assert rate == 0.1 * 0.5**EPOCHS
    assert [state["global_step"] for state in states] == list(range(1, steps + 1))
    for number, state in enumerate(states):
        resumed = run(operator, tmp_path / str(number), state, grows=grows)
        # A checkpoint of the last step is from before the epoch's end, where schedulers step.
        assert resumed[0] == steps, state["position"]
        assert resumed[1] == rate or state is states[-1], state["position"]
        assert torch.equal(resumed[2], undisturbed), state["position"]


def cursor_of(size, samples=22):
    loader = DataLoader(range(samples), size)
    return Cursor(ShardedLoader(loader, ShardAssignment(1, range(1), 0), parts=BatchParts.BY_SHARD))


def test_an_epoch_that_is_over_needs_no_step_of_the_new_size():
    """Its place was looked for in steps of the new size."""
    cursor = cursor_of(6)
    cursor.move_to(0, 4)
    for size, samples in ((7, 22), (6, 100), (6, 3)):
        other = cursor_of(size, samples)
        other.load_place(cursor.place)
        assert other.epochs_finished == 1
        assert other.ends_before(other.step)


def test_an_epoch_that_is_not_over_is_not_taken_for_one_by_its_length():
    cursor = cursor_of(6)
    cursor.move_to(0, 3)
    other = cursor_of(6, 12)
    other.load_place(cursor.place)
    assert other.epochs_finished == 0


def test_a_state_of_an_earlier_version_is_judged_by_the_length():
    for step, expected in ((3, 0), (4, 1)):
        cursor = cursor_of(6)
        cursor.load_place({"epoch": 0, "step": step, "samples_per_step": 6})
        assert cursor.epochs_finished == expected
