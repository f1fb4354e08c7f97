# SPDX-License-Identifier: Apache-2.0
"""`Cursor`: where an epoch ends, if a `__len__` of the user's is right, too small or too large;
when ranks agree on what they read; and what becomes of an epoch that is read anew in its middle."""

import itertools
import random

import pytest
import torch
from tests.unit.trainer.programs import SAMPLES, Regression, problem, trainer, weights
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep import TorchTrainer
from lockstep.data import BatchParts, ShardAssignment, ShardedLoader, UserShardedLoader
from lockstep.errors import DataOrderError
from lockstep.group import Group
from lockstep.worker.data_cursor import Cursor

ALONE = ShardAssignment(1, range(1), 0)
TOO_LONG = "more batches than its `__len__` says"


class Stream(IterableDataset):
    """Its passes go on in one stream, as those over a queue or a socket do."""

    def __init__(self, claimed: int, real: int) -> None:
        self.claimed, self.real = claimed, real
        self.numbers = itertools.count()

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> object:
        return itertools.islice(self.numbers, self.real)


class Order(Sampler):
    def __init__(self, claimed: int, real: int) -> None:
        self.claimed, self.real = claimed, real

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> object:
        return iter(range(self.real))


def by_stream(claimed: int, real: int) -> DataLoader:
    return DataLoader(Stream(claimed, real), batch_size=4)


def by_sampler(claimed: int, real: int) -> DataLoader:
    return DataLoader(range(100), batch_size=4, sampler=Order(claimed, real))


def by_batch_sampler(claimed: int, real: int) -> DataLoader:
    class Batches(Order):
        def __len__(self) -> int:
            return -(-self.claimed // 4)

        def __iter__(self) -> object:
            return iter(torch.arange(self.real).split(4))

    return DataLoader(range(100), batch_sampler=Batches(claimed, real))


def sharded(loader: object) -> Cursor:
    return Cursor(ShardedLoader(loader, ALONE, parts=BatchParts.BY_SHARD))


def steps_until_the_end(cursor: Cursor) -> int:
    """As `BatchIterator` goes: it looks for the end after each step that was committed."""
    while not cursor.ends_before(cursor.step):
        assert cursor.take() is not None
        cursor.commit()
    return cursor.step


MAKERS = pytest.mark.parametrize("make", [by_stream, by_sampler, by_batch_sampler])


@MAKERS
def test_what_comes_after_a_length_that_is_too_small_is_refused(make: object) -> None:
    cursor = sharded(make(20, 23))
    with pytest.raises(DataOrderError, match=TOO_LONG):
        steps_until_the_end(cursor)
    assert cursor.step == 5


@MAKERS
def test_the_end_comes_where_the_data_ends_and_not_where_it_should(make: object) -> None:
    assert steps_until_the_end(sharded(make(24, 18))) == 5
    assert steps_until_the_end(sharded(make(20, 20))) == 5
    assert steps_until_the_end(sharded(make(18, 20))) == 5  # no batch is left out


def test_a_users_own_shard_of_the_data_is_not_cut_off() -> None:
    with pytest.raises(DataOrderError, match=TOO_LONG):
        steps_until_the_end(Cursor(UserShardedLoader(by_sampler(20, 23), ALONE)))
    assert steps_until_the_end(Cursor(UserShardedLoader(by_sampler(20, 20), ALONE))) == 5


def test_to_look_for_the_end_takes_nothing_from_the_next_pass() -> None:
    cursor = sharded(by_stream(8, 8))
    seen = []
    for _ in range(3):
        while not cursor.ends_before(cursor.step):
            seen += cursor.take().parts[0].batch.tolist()
            cursor.commit()
        cursor.finish_epoch()
    assert seen == list(range(24))


def test_torchs_own_samplers_are_not_asked() -> None:
    for shuffle in (False, True):
        source = sharded(DataLoader(range(20), batch_size=4, shuffle=shuffle)).source
        assert source.has_exact_length
    assert not sharded(by_sampler(20, 20)).source.has_exact_length


def test_a_position_at_the_end_is_not_looked_behind() -> None:
    """The pass that came to it has looked: nothing is read again after a resume."""
    dataset = Stream(20, 20)
    cursor = sharded(DataLoader(dataset, batch_size=4))
    cursor.move_to(0, 5)
    assert cursor.ends_before(5)
    assert next(dataset.numbers) == 0


def test_a_group_agrees_once_in_an_epoch_wherever_it_begins() -> None:
    class Counting(UserShardedLoader):
        asked = 0

        def agree(self, group: Group, epoch: int) -> None:
            self.asked += 1
            super().agree(group, epoch)

    source = Counting(by_sampler(20, 20), ALONE)
    cursor, asked = Cursor(source), []
    first, second = Group(None), Group(None)

    def agree(group: Group) -> None:
        cursor.agree(group)
        asked.append(source.asked)

    for group in (first, first, second):
        agree(group)
        cursor.take()
        cursor.commit()
    cursor.finish_epoch()
    agree(second)
    cursor.forget_agreement()
    agree(second)
    assert asked == [1, 1, 2, 3, 4]


class ShufflesItsOwnList(Sampler):
    """Batches of neighbours, shuffled in place each time."""

    def __init__(self, size: int) -> None:
        self.groups = [list(range(k, min(k + 2, size))) for k in range(0, size, 2)]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> object:
        random.shuffle(self.groups)
        return iter(self.groups)


class CountsItsPasses(Sampler):
    def __init__(self, size: int) -> None:
        self.size, self.passes = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> object:
        self.passes += 1
        return iter(self.order())

    def order(self) -> list[int]:
        return random.Random(self.passes).sample(range(self.size), self.size)


class CountsPassesToTheEnd(CountsItsPasses):
    def __iter__(self) -> object:
        yield from self.order()
        self.passes += 1


class FromTheSystem(CountsItsPasses):
    def order(self) -> list[int]:
        return random.SystemRandom().sample(range(self.size), self.size)


class IsToldTheEpoch(CountsItsPasses):
    """Reads lists, so that it may stand for a batch sampler, too."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> object:
        return iter(random.Random(self.epoch).sample(range(self.size), self.size))


class DrawsWhileItIsRead(CountsItsPasses):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> object:
        for start in range(0, self.size, 3):
            order = torch.randperm(3, generator=self.generator) + start
            yield from [k for k in order.tolist() if k < self.size]
            random.random()


DATA = TensorDataset(*problem())
WEIGHTS = torch.arange(1.0, SAMPLES + 1)
UNSTEADY = {
    "shuffles": lambda: DataLoader(DATA, batch_sampler=ShufflesItsOwnList(SAMPLES)),
    "counts": lambda: DataLoader(DATA, 6, sampler=CountsItsPasses(SAMPLES)),
    "system": lambda: DataLoader(DATA, 6, sampler=FromTheSystem(SAMPLES)),
}
STEADY = {
    "told": lambda: DataLoader(DATA, 6, sampler=IsToldTheEpoch(SAMPLES)),
    "batches": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(IsToldTheEpoch(SAMPLES), 6, drop_last=False)
    ),
    "lists": lambda: DataLoader(
        DATA, None, sampler=BatchSampler(IsToldTheEpoch(SAMPLES), 6, drop_last=False)
    ),
    "draws": lambda: DataLoader(DATA, 6, sampler=DrawsWhileItIsRead(SAMPLES)),
    "weighted": lambda: DataLoader(DATA, 6, sampler=WeightedRandomSampler(WEIGHTS, SAMPLES)),
    "shuffled": lambda: DataLoader(DATA, 6, shuffle=True),
}


class Reads(Regression):
    def data(self) -> object:
        return self.config["data"]()

    def compute_loss(self, batch: object, batch_info: object) -> object:
        if self.global_step == self.config.get("fails_at"):
            self.config["fails_at"] = None
            raise ZeroDivisionError
        return super().compute_loss(batch, batch_info)


def reads(data: object, **config: object) -> TorchTrainer:
    return trainer(Reads, config={"data": data, **config})


@pytest.mark.parametrize("name", UNSTEADY)
def test_an_order_that_cannot_come_again_ends_the_epoch_that_was_interrupted(name: str) -> None:
    with reads(UNSTEADY[name], fails_at=2) as one:
        with pytest.raises(ZeroDivisionError):
            one.train()
        with pytest.raises(DataOrderError, match="epoch 0, which goes on at global batch 2"):
            one.train()


@pytest.mark.parametrize("name", UNSTEADY)
def test_without_an_interruption_no_order_has_to_come_again(name: str) -> None:
    with reads(UNSTEADY[name]) as one:
        one.train()
        one.train(num_steps=2)
        one.validate()
        assert one.train()["batch_count"] > 0


@pytest.mark.parametrize("name", UNSTEADY)
def test_an_order_that_cannot_come_again_ends_the_epoch_that_was_saved(name: str) -> None:
    with reads(UNSTEADY[name]) as one:
        one.train()
        one.train(num_steps=2)
        state = one.state_dict()
        one.load_state_dict(state)
        with pytest.raises(DataOrderError, match="shuffles a list of its own in place"):
            one.train()
    with reads(UNSTEADY[name]) as one:
        one.load_state_dict(state)
        with pytest.raises(DataOrderError, match="shuffles a list of its own in place"):
            one.train()


def interrupted_and_saved(data: object) -> torch.Tensor:
    with reads(data, fails_at=2) as one:
        with pytest.raises(ZeroDivisionError):
            one.train()
        one.train()
        one.train(num_steps=2)
        state = one.state_dict()
    with reads(data, fails_at=7) as one:
        one.load_state_dict(state)
        with pytest.raises(ZeroDivisionError):
            one.train()
        one.train()
        return weights(one.get_model())


@pytest.mark.parametrize("name", STEADY)
def test_an_order_that_comes_again_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with reads(STEADY[name]) as one:
        one.train()
        one.train()
        expected = weights(one.get_model())
    assert torch.equal(interrupted_and_saved(STEADY[name]), expected)
    assert not caplog.records


class Fresh(IterableDataset):
    """Other samples in each pass."""

    def __iter__(self) -> object:
        order = random.SystemRandom().sample(range(SAMPLES), SAMPLES)
        return iter([DATA[k] for k in order])


class FreshBatches:
    def __iter__(self) -> object:
        return iter(DataLoader(Fresh(), 6))


@pytest.mark.parametrize("data", [lambda: DataLoader(Fresh(), 6), FreshBatches])
def test_streams_need_not_come_again(data: object, caplog: pytest.LogCaptureFixture) -> None:
    assert interrupted_and_saved(data).isfinite().all()
    assert not caplog.records


def test_a_counter_that_is_saved_with_the_run_goes_on() -> None:
    class SavesItsPasses(Reads):
        def state_dict(self) -> dict:
            return {"passes": self.sampler.passes - 1}

        def load_state_dict(self, state: dict) -> None:
            self.sampler.passes = state["passes"]

        def data(self) -> object:
            self.sampler = CountsItsPasses(SAMPLES)
            return DataLoader(DATA, 6, sampler=self.sampler)

    with trainer(SavesItsPasses) as one:
        one.train()
        one.train(num_steps=2)
        state = one.state_dict()
        one.train()
        expected = weights(one.get_model())
    with trainer(SavesItsPasses) as one:
        one.load_state_dict(state)
        one.train()
        assert torch.equal(weights(one.get_model()), expected)


def saved_in_the_middle(data: object) -> dict:
    with reads(data) as one:
        one.train()
        one.train(num_steps=2)
        return one.state_dict()


@pytest.mark.parametrize("size", [4, 6])
def test_a_loader_that_was_changed_on_purpose_goes_on(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = saved_in_the_middle(STEADY["told"])
    with reads(lambda: DataLoader(DATA, size, sampler=IsToldTheEpoch(SAMPLES - 1))) as one:
        one.load_state_dict(state)
        assert one.train()["batch_count"] == (3 if size == 4 else 2)
    assert ["in another order" in each.message for each in caplog.records] == [True]


def test_another_batch_size_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    state = saved_in_the_middle(STEADY["told"])
    with reads(lambda: DataLoader(DATA, 4, sampler=IsToldTheEpoch(SAMPLES))) as one:
        one.load_state_dict(state)
        assert one.train()["num_samples"] == SAMPLES - 2 * 6
    assert not caplog.records


def test_an_order_that_only_a_whole_run_gives_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may have been changed on purpose, and then it is none of ours."""

    def counting() -> Cursor:
        return sharded(DataLoader(range(600), 4, sampler=CountsPassesToTheEnd(600)))

    run = counting()
    assert steps_until_the_end(run) == 150
    run.finish_epoch()
    for _ in range(2):
        run.take()
        run.commit()
    resumed = counting()
    resumed.load_place(run.place)
    assert resumed.take().index == 2
    assert ["in another order" in each.message for each in caplog.records] == [True]
    resumed.load_place(resumed.place)
    assert resumed.take().index == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["told", "counts"])
def test_a_state_of_an_earlier_version_goes_on(name: str) -> None:
    data = {**STEADY, **UNSTEADY}[name]
    state = saved_in_the_middle(data)
    assert state["position"]["train"].pop("first_items")
    assert state["position"]["train"].pop("samples_per_step") == 6
    assert state["position"]["train"].pop("is_over") is False
    assert state["position"]["train"] == {"epoch": 1, "step": 2}
    with reads(data) as one:
        one.load_state_dict(state)
        assert one.train()["batch_count"] == 2


def test_torchs_own_orders_need_no_look() -> None:
    assert "first_items" not in saved_in_the_middle(STEADY["shuffled"])["position"]["train"]


def test_an_order_of_the_users_own_does_not_keep_the_size_of_torchs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The epoch ended by the size of an order that is gone, and lost samples were told of."""
    shuffled = sharded(DataLoader(range(50), batch_size=5, shuffle=True))
    for _ in range(3):
        shuffled.take()
        shuffled.commit()
    cursor = sharded(DataLoader(range(100), batch_size=5, sampler=Order(100, 100)))
    cursor.load_place(shuffled.place)
    assert cursor.take().index == 3
    assert cursor.steps_per_epoch == 20
    cursor.commit()
    assert steps_until_the_end(cursor) == 20
    assert [each.message for each in caplog.records if "are gone" in each.message] == []


class EndsByCtrlC:
    """A source whose reading is interrupted where it is closed, as loaders' processes end."""

    first_items = None

    def batches(self, epoch: int, start_step: int = 0) -> object:
        try:
            yield epoch
        finally:
            raise KeyboardInterrupt


def test_an_epoch_that_ctrl_c_interrupts_as_it_ends_has_ended() -> None:
    cursor = Cursor(EndsByCtrlC())
    cursor.take()
    cursor.commit()
    cursor.has_scheduled = True
    with pytest.raises(KeyboardInterrupt):
        cursor.finish_epoch()
    assert cursor.place == {"epoch": 1, "step": 0}


def test_of_two_threads_that_read_first_one_agrees(monkeypatch):
    cursor = Cursor(ShardedLoader(by_sampler(8, 8), ALONE, parts=BatchParts.BY_SHARD))
    calls = []

    def agree(group):
        calls.append(group)
        cursor.agree_if_unread()  # as another thread would meanwhile

    monkeypatch.setattr(cursor, "agree", agree)
    cursor.agree_at_read(group := Group(None))
    cursor.agree_if_unread()
    assert calls == [group]
