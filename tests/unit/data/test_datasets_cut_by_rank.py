# SPDX-License-Identifier: Apache-2.0
"""A dataset or stream that each rank has cut already loses samples: refused, or told of.

`lockstep.dataset_contents`, `lockstep.held_columns` and `lockstep.data.sample_numbers`.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from harness import run_ranks
from lockstep.data import BatchParts, ShardAssignment, ShardedLoader, sample_numbers, shard_loader
from lockstep.data.sample_numbers import numbers_of
from lockstep.dataset_contents import held_contents
from lockstep.errors import DataOrderError

SIZE = 40
GENERATOR = torch.Generator().manual_seed(2)
ROWS = torch.randn(SIZE, 4, generator=GENERATOR)
LABELS = [number % 3 for number in range(SIZE)]


class Holds(Dataset[Any]):
    """Holds `held`; to be asked for a sample is an error."""

    def __init__(self, held: Any, size: int = SIZE // 2, **others: Any) -> None:
        self.held, self.size, self.others = held, size, others

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was read, which may draw random numbers")


class Item:
    """A sample of a class of the program's own."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.address = id(self)


@dataclass
class Record:
    number: int
    name: str


class Items(IterableDataset[Item]):
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Item]:
        return map(Item, self.numbers)


class Named:
    """A sample that names itself anew in each process."""

    def __init__(self, rank: int, number: int) -> None:
        self.id, self.rows = f"{rank}-{number}", ROWS[number]
        self.made_at = 1_700_000_000 + rank


class Stream(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items * SIZE)


class Mapped(IterableDataset[Item]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Item]:
        return map(Item, self.rows)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(1 + n % 3) for n in range(SIZE // 2)])


def chunked(numbers: range) -> Any:
    """A table of several chunks, as a dataset of several files has them."""
    rows = [pyarrow.table({"text": [f"row {number}"]}) for number in numbers]
    return Holds(pyarrow.concat_tables(rows))


def pictures(rank: int) -> Any:
    """Pictures that each rank has encoded for itself."""
    return Holds(pyarrow.table({"bytes": [bytes([rank] * 9)] * SIZE}), SIZE)


def rows_of_text() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [f"row {number}" for number in range(SIZE)]})


def frame() -> pandas.DataFrame:
    return pandas.DataFrame({"x": ROWS[:, 0].numpy(), "label": LABELS})


def mine(rank: int) -> slice:
    return slice(rank, None, 2)


REFUSED: dict[str, Callable[[int], Any]] = {
    "every second row of a table": lambda rank: rows_of_text().shard(2, rank, contiguous=False),
    "half of a table": lambda rank: rows_of_text().shard(2, rank, contiguous=True),
    "a view of half a table": lambda rank: Holds(rows_of_text().shard(2, rank)),
    "indices": lambda rank: Holds(np.arange(SIZE)[mine(rank)]),
    "indices on their own": lambda rank: range(rank, SIZE, 2),
    "names": lambda rank: Holds(np.array([f"{number}.png" for number in range(SIZE)])[mine(rank)]),
    "rows of a frame": lambda rank: Holds(frame()[mine(rank)]),
    "records": lambda rank: [Record(number, f"{number}.png") for number in range(rank, SIZE, 2)],
    "an order": lambda rank: Holds(torch.randperm(SIZE, generator=seeded(rank)), SIZE),
    "a table of many chunks": lambda rank: chunked(range(rank, SIZE, 2)),
    "what half of a table was chosen from": lambda rank: Subset(
        rows_of_text().shard(2, rank), range(SIZE // 4)
    ),
    "a stream of objects with tensors": lambda rank: Mapped(ROWS[mine(rank)]),
}


def seeded(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


def drawn(rank: int) -> torch.Tensor:
    return torch.randn(SIZE // 2, 4, generator=seeded(rank))


TOLD_OF: dict[str, Callable[[int], Any]] = {
    "the fourth tensor behind a choice": lambda rank: Subset(
        TensorDataset(*[torch.ones(SIZE // 2)] * 3, ROWS[mine(rank)]), range(SIZE // 4)
    ),
    "tensors": lambda rank: TensorDataset(ROWS[mine(rank)]),
    "an array": lambda rank: ROWS.numpy()[mine(rank)],
    "a tensor": lambda rank: ROWS[mine(rank)],
    "tensors in attributes": lambda rank: Holds((ROWS[mine(rank)], torch.ones(SIZE // 2))),
    "pairs": lambda rank: [*zip(ROWS[mine(rank)], LABELS[mine(rank)], strict=True)],
    "objects": lambda rank: [Item(number) for number in range(rank, SIZE, 2)],
    "objects with floats": lambda rank: [Item(float(row[0])) for row in ROWS[mine(rank)]],
    "a frame numbered anew": lambda rank: Holds(frame()[mine(rank)].reset_index(drop=True)),
    "a table of numbers": lambda rank: datasets.Dataset.from_dict({"x": ROWS.tolist()}).shard(
        2, rank
    ),
    "random numbers that nobody has seeded": lambda rank: TensorDataset(drawn(rank)),
    "labels that are all different by chance": lambda rank: Holds(
        torch.randperm(1000, generator=seeded(rank))[: SIZE // 2]
    ),
    "lists of random tokens": lambda rank: (
        np.random.default_rng(rank).integers(0, 99, (9, 9)).tolist()
    ),
    "random tokens": lambda rank: Holds(
        np.random.default_rng(rank).integers(0, 99, (SIZE // 2, 16))
    ),
}


class Augmented(Dataset[Any]):
    """Draws whenever it is asked, and holds on each rank what that rank may well hold."""

    def __init__(self, rank: int) -> None:
        self.rows = ROWS * (1 + rank * 1e-6)  # computed by another kind of processor
        self.halves = (ROWS * (1 + rank * 1e-2)).half()
        self.cache: list[Any] = [None] * SIZE
        self.folder, self.pid, self.started = f"/scratch/{rank}", rank, float(rank)
        self.generator = torch.Generator().manual_seed(rank)
        self.objects = [Holds(None) for _ in range(SIZE)]
        self.blank = torch.zeros(SIZE)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + torch.randn(4, generator=self.generator)


RIGHT: dict[str, Callable[[int], Any]] = {
    "augmented": Augmented,
    "a table": lambda _: rows_of_text().shuffle(seed=1),
    "a frame": lambda _: Holds(frame(), SIZE),
    "tensors": lambda _: TensorDataset(ROWS, torch.tensor(LABELS)),
    "objects": lambda _: [Item(number) for number in range(SIZE)],
    "a stream of objects": lambda _: Items(range(SIZE)),
    "objects with names of their own": lambda rank: [Named(rank, n) for n in range(SIZE)],
    "a stream of objects with names of their own": lambda rank: Stream([Named(rank, 1)]),
    "a nested tensor": lambda _: Holds(nested()),
    "pictures in a table": lambda rank: pictures(rank),
    "few samples": lambda rank: TensorDataset(drawn(rank)[:7]),
}


def shared(make: Callable[[int], Any]) -> None:
    """Two ranks, each with the loader over what it makes."""

    def body(group: Any) -> None:
        data = make(group.rank)
        loader = shard_loader(DataLoader(data, batch_size=4, collate_fn=list), group=group)
        if isinstance(data, IterableDataset):
            next(iter(loader))

    run_ranks(2, body)


@pytest.fixture(autouse=True)
def _nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_numbers, "_told_of", set())


@pytest.mark.parametrize("case", REFUSED)
def test_a_cut_that_names_or_indices_show_is_refused(case: str) -> None:
    """Half of the data was never read."""
    with pytest.raises(DataOrderError):
        shared(REFUSED[case])


@pytest.mark.parametrize("case", TOLD_OF)
def test_a_cut_that_only_numbers_show_is_told_of(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be unseeded synthetic data as well, of which nothing is lost."""
    shared(TOLD_OF[case])
    told = [record.message for record in caplog.records]
    assert len(told) == 1  # rank 0 tells for all
    assert "seed it alike" in told[0]
    assert "rank(s) 1" in told[0]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("case", RIGHT)
def test_ranks_with_the_same_samples_are_left_in_peace(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    shared(RIGHT[case])
    assert not caplog.records


def test_a_run_is_told_once_and_not_in_each_epoch(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: Any) -> None:
        assignment = ShardAssignment(2, range(group.rank, group.rank + 1), 0)
        for _ in range(2):  # a loader of its own, as in a function that evaluates
            loader = DataLoader(TOLD_OF["tensors"](group.rank), batch_size=4)
            sharded = ShardedLoader(loader, assignment, parts=BatchParts.BY_SHARD)
            for epoch in range(3):
                sharded.agree(group, epoch)

    run_ranks(2, body)
    assert len(caplog.records) == 1
    assert "in its `tensors[0]`" in caplog.text


class Hostile(dict[str, Any]):
    """An object of the program's, of which nothing may be called."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def _refuse(self, *_: Any) -> Any:
        raise SystemExit("the program's code was called")

    __getitem__ = __getattr__ = __iter__ = __len__ = items = values = keys = _refuse


class Unread(Mapping[str, Any]):
    """Reads a file for each value it is asked for."""

    calls = 0

    def __getitem__(self, key: str) -> Any:
        Unread.calls += 1
        return key

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


def test_samples_that_hold_their_dataset_are_looked_at_without_a_call() -> None:
    """However much lies behind them: each one would be described with all others."""
    for make in (Hostile, lambda _: Unread()):
        data = Holds([None] * 1000, 1000)
        data.held = [make(data) for _ in range(1000)]
        begun = time.perf_counter()
        assert held_contents(data) == numbers_of(data) == []
        assert time.perf_counter() - begun < 1
    assert not Unread.calls


def test_of_long_lists_in_a_table_a_few_elements_are_read() -> None:
    sounds = [[0.5] * 500_000] * 16
    data = Holds(pyarrow.table({"sound": sounds}), 16)
    tracemalloc.start()
    assert len(numbers_of(data)) == 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_of_a_table_no_column_is_copied() -> None:
    """Not the chunks of strings, which `take` joins."""
    texts = pyarrow.chunked_array([[f"{number}." * 1_000_000] for number in range(16)])
    data = Holds(pyarrow.table({"text": texts}), 16)
    pool = pyarrow.system_memory_pool()
    before, peak = pyarrow.default_memory_pool(), pool.max_memory() or 0
    pyarrow.set_memory_pool(pool)
    try:
        assert len(held_contents(data)) == 1
    finally:
        pyarrow.set_memory_pool(before)
    assert (pool.max_memory() or 0) - peak < 1_000_000


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_a_stream_may_have_nested_tensors_for_items() -> None:
    loader = DataLoader(Stream([nested()]), 4, collate_fn=lambda items: torch.ones(len(items)))
    sharded = ShardedLoader(loader, ShardAssignment(2, range(1), 0), parts=BatchParts.BY_SHARD)
    assert sharded.fingerprint(0)["first_batch"]


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError])
def test_an_error_of_a_length_tells_nothing(error: type[Exception]) -> None:
    class Unopened(Holds):
        def __len__(self) -> int:
            raise error("no file is open yet")

    assert held_contents(Unopened(LABELS)) == numbers_of(Unopened(LABELS)) == []
