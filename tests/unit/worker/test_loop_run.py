# SPDX-License-Identifier: Apache-2.0
"""Where a run is cut into calls changes nothing: weights, metrics, epochs, schedules."""

import itertools
import random

import pytest
import torch
from tests.unit.trainer.programs import (
    BATCH,
    SAMPLES,
    STEPS_PER_EPOCH,
    Regression,
    Streaming,
    by_hand,
    loader,
    problem,
    same,
    trainer,
    weights,
)
from torch.utils.data import DataLoader, Dataset

from lockstep.errors import DataOrderError

WHOLE = None


class Scheduled(Regression):
    def setup(self, config):
        super().setup(config)
        self._lockstep.registered.schedulers.append(
            torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)
        )


class ScheduledStream(Scheduled, Streaming):
    pass


class CallsTheDefaultEpoch(ScheduledStream):
    def train_epoch(self, iterator, info):
        return super().train_epoch(iterator, info)


def run(calls, operator=Regression, **arguments):
    with trainer(operator, **arguments) as one:
        results = [one.train() if steps is WHOLE else one.train(num_steps=steps) for steps in calls]
        model = one.get_model()
        learning_rate = one.get_local_operator().optimizer.param_groups[0]["lr"]
        state = one.state_dict()
    return weights(model), results, learning_rate, state


@pytest.mark.parametrize("operator", [Regression, Streaming])
@pytest.mark.parametrize("calls", [[10], [4, 4, 2], [3, 7], [1] * 10, [4, 1, 5], [6, WHOLE, 2]])
def test_the_cut_of_calls_does_not_change_the_weights(operator, calls):
    got, results, _, state = run(calls, operator)
    assert same(got, by_hand(10))
    assert sum(result["batch_count"] for result in results) == 10
    assert sum(result["num_samples"] for result in results) == 2 * SAMPLES + 12
    assert results[-1]["epoch"] == state["epoch"] == 3
    assert state["global_step"] == 10


class Broken(Dataset):
    """One sample cannot be read."""

    def __init__(self):
        self.samples = list(zip(*problem(), strict=True))
        self.is_mended = False

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index == 14 and not self.is_mended:
            raise OSError("a broken file")
        return self.samples[index]


class LeavesOut(Regression):
    """Its loop goes on behind what cannot be read."""

    def data(self):
        self.dataset = Broken()
        return DataLoader(self.dataset, BATCH)

    def train_epoch(self, iterator, info):
        steps = 0
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return {"steps": steps}
            except OSError:
                continue
            super().train_batch(batch, info)
            steps += 1


def test_a_loop_that_goes_on_behind_what_cannot_be_read_is_refused():
    """An error ends the reading: the rest of the epoch would be left out."""
    with trainer(LeavesOut) as one:
        with pytest.raises(DataOrderError, match="could not be read") as caught:
            one.train()
        assert "a broken file" in str(caught.value)
        one.get_local_operator().dataset.is_mended = True
        one.train()
        assert one.get_local_operator().global_step == STEPS_PER_EPOCH


class ValidatesBroken(Regression):
    def setup(self, config):
        super().setup(config)
        self.dataset = Broken()
        self.register_data(train_loader=loader(), validation_loader=DataLoader(self.dataset, BATCH))


def test_a_call_after_one_that_failed_where_it_read_begins_anew():
    with trainer(ValidatesBroken) as one:
        with pytest.raises(OSError, match="a broken file"):
            one.validate()
        one.get_local_operator().dataset.is_mended = True
        assert one.validate()["num_samples"] == SAMPLES


class TrainsOnBroken(Regression):
    def data(self):
        self.dataset = Broken()
        return DataLoader(self.dataset, BATCH)


@pytest.mark.parametrize("calls_own", [False, True])
def test_an_epoch_goes_on_where_a_call_failed_to_read(calls_own):
    class Own(TrainsOnBroken):
        def train_epoch(self, iterator, info):
            return super().train_epoch(iterator, info)

    with trainer(Own if calls_own else TrainsOnBroken) as one:
        with pytest.raises(OSError, match="a broken file"):
            one.train()
        one.get_local_operator().dataset.is_mended = True
        one.train()
        assert one.get_local_operator().global_step == STEPS_PER_EPOCH
        assert same(weights(one.get_model()), by_hand(STEPS_PER_EPOCH))


class Replays(Regression):
    """Trains on what it has kept, when there are no more batches."""

    def train_epoch(self, iterator, info):
        kept, self.drawn = list(iterator), []
        for index in range(6):
            self.drawn.append(random.random())
            super().train_batch(random.choice(kept), {"batch_idx": index})
        return {}


def test_a_loop_that_trains_on_batches_of_its_own_goes_on_to_draw():
    with trainer(Replays) as one:
        one.train()
        drawn = one.get_local_operator().drawn
    assert len(set(drawn)) == len(drawn)


class ValidatesWithin(Regression):
    def train_epoch(self, iterator, info):
        self.seen = []
        for index, batch in enumerate(iterator):
            super().train_batch(batch, {"batch_idx": index})
            self.seen.append(self.validate(loader(), {})["val_loss"])
            self.model.train()
        return {"val_loss": self.seen[-1]}


def test_a_validation_within_a_training_loop_counts_for_itself():
    with trainer(ValidatesWithin) as one:
        result = one.train()
        seen = one.get_local_operator().seen
        assert result["val_loss"] == seen[-1] != seen[0]
        assert one.validate()["val_loss"] == pytest.approx(seen[-1], rel=1e-12)


class ByClass(Regression):
    def validate(self, iterator, info):
        return {**super().validate(iterator, info), 0: 0.25, 1: 0.75}


def test_names_of_metrics_that_are_no_strings_become_some():
    with trainer(ByClass) as one:
        result = one.validate()
    assert (result["0"], result["1"]) == (0.25, 0.75)


@pytest.mark.parametrize("operator", [Regression, Streaming])
def test_shuffled_epochs_do_not_depend_on_the_cut(operator):
    whole, *_ = run([WHOLE, WHOLE, WHOLE], operator, config={"shuffle": True})
    cut, *_ = run([5, 2, 5], operator, config={"shuffle": True})
    assert torch.equal(whole, cut)


def test_the_sum_behind_the_metrics_does_not_depend_on_the_cut():
    _, whole, *_ = run([12])
    _, cut, *_ = run([1, 5, 3, 3])
    total = sum(result["train_loss"] * result["num_samples"] for result in whole)
    parts = sum(result["train_loss"] * result["num_samples"] for result in cut)
    assert parts == pytest.approx(total, rel=1e-12)
    assert cut[-1]["last_train_loss"] == whole[-1]["last_train_loss"]


def test_metrics_have_the_numbers_of_the_runs_steps():
    """By them the last loss is found of workers that have seen different parts of a call."""
    with trainer() as one:
        one.train(num_steps=3)
        one.train(num_steps=2)
        assert (
            one.get_local_operator()._lockstep.meters.state()["sums"]["train_loss"].last_step == 5
        )


@pytest.mark.parametrize("operator", [Scheduled, ScheduledStream])
@pytest.mark.parametrize("calls", [[9], [4, 4, 1], [4, 5], [8, 1], [3, WHOLE, 5], [1] * 9])
def test_an_epoch_schedule_steps_once_an_epoch_however_calls_are_cut(operator, calls):
    *_, learning_rate, _ = run(calls, operator, scheduler_step_freq="epoch")
    assert learning_rate == 0.1 * 0.5**2


@pytest.mark.parametrize("operator", [ScheduledStream, CallsTheDefaultEpoch])
def test_an_epoch_that_shows_to_be_over_after_a_resume_steps_its_schedule(operator):
    with trainer(operator, scheduler_step_freq="epoch") as one:
        one.train(num_steps=STEPS_PER_EPOCH)
        one.validate()  # it ends an epoch of its own data
        state = one.state_dict()
    with trainer(operator, scheduler_step_freq="epoch") as another:
        another.load_state_dict(state)
        another.train(num_steps=1)
        assert another.get_local_operator().optimizer.param_groups[0]["lr"] == 0.05


def test_a_batch_schedule_steps_once_a_step():
    *_, learning_rate, _ = run([3, WHOLE, 2], Scheduled, scheduler_step_freq="batch")
    assert learning_rate == pytest.approx(0.1 * 0.5**6, rel=1e-12)


def test_whole_epochs_after_a_part_of_one():
    with trainer() as one:
        assert one.train(num_steps=3)["batch_count"] == 3
        rest = one.train()
        assert (rest["batch_count"], rest["num_samples"], rest["epoch"]) == (1, 4, 1)
        assert one.train()["epoch"] == 2
        # The end of an epoch of unknown length shows only when one looks further.
    with trainer(Streaming) as one:
        one.train(num_steps=STEPS_PER_EPOCH)
        assert one.train()["batch_count"] == STEPS_PER_EPOCH
        assert one.train(num_steps=STEPS_PER_EPOCH + 1)["batch_count"] == STEPS_PER_EPOCH + 1


def test_validation_goes_on_where_it_stopped():
    with trainer() as one:
        whole = one.validate()
        parts = [one.validate(num_steps=steps) for steps in (1, 2, 1)]
        again = one.validate()
    assert whole == again
    assert [part["num_samples"] for part in parts] == [6, 12, 4]
    total = sum(part["val_loss"] * part["num_samples"] for part in parts) / SAMPLES
    assert total == pytest.approx(whole["val_loss"], rel=1e-12)


def test_validation_across_ends_of_its_data():
    with trainer() as one:
        result = one.validate(num_steps=9)
    assert (result["batch_count"], result["num_samples"]) == (9, 2 * SAMPLES + 6)


def test_training_and_validation_keep_separate_positions():
    with trainer() as one:
        for _ in range(5):
            one.train(num_steps=2)
            one.validate(num_steps=3)
        got = weights(one.get_model())
    assert same(got, by_hand(10))


class Watching(Regression):
    def setup(self, config):
        super().setup(config)
        self.seen = []

    def train_batch(self, batch, batch_info):
        self.seen.append((batch_info["epoch_idx"], batch_info["batch_idx"], self.global_step))
        assert batch_info["global_step"] == self.global_step
        return super().train_batch(batch, batch_info)


def test_epoch_index_and_global_step_count_epochs_and_steps():
    with trainer(Watching) as one:
        one.train(num_steps=3)
        one.train(num_steps=3)
        operator = one.get_local_operator()
        assert operator.global_step == 6
    epochs, batches, steps = zip(*operator.seen, strict=True)
    assert epochs == (0, 0, 0, 0, 1, 1)
    assert batches == (0, 1, 2, 3, 0, 1)
    assert list(steps) == list(itertools.islice(itertools.count(), 6))


class Numbered(Watching):
    """A learning rate from the place in the epoch, as MAE, DINO and timm set it."""

    def train_batch(self, batch, batch_info):
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + batch_info["batch_idx"])
        return super().train_batch(batch, batch_info)

    def validate_batch(self, batch, batch_info):
        self.validated = [*getattr(self, "validated", []), batch_info["batch_idx"]]
        return super().validate_batch(batch, batch_info)


def test_a_batchs_number_is_its_place_in_the_epoch_however_calls_are_cut(tmp_path):
    with trainer(Numbered) as one:
        one.train()
        undisturbed = weights(one.get_model())
    with trainer(Numbered) as one:
        one.train(num_steps=3)
        one.validate(num_steps=1)
        one.validate(num_steps=2)
        assert one.get_local_operator().validated == [0, 1, 2]
        path = one.save(tmp_path / "state")
    with trainer(Numbered) as one:
        one.load(path)
        one.train()
        assert one.get_local_operator().seen == [(0, 3, 3)]
        assert torch.equal(weights(one.get_model()), undisturbed)
