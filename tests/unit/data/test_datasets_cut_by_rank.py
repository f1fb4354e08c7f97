# SPDX-License-Identifier: Apache-2.0
"""A dataset or stream that each rank has cut already loses samples: refused, or told of.

`lockstep.dataset_contents`, `lockstep.held_columns` and `lockstep.data.sample_numbers`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from harness import run_ranks
from lockstep.data import BatchParts, ShardAssignment, ShardedLoader, shard_loader
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


class Items(IterableDataset[Item]):
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Item]:
        return map(Item, self.numbers)


class Mapped(IterableDataset[Item]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Item]:
        return map(Item, self.rows)


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
    "objects": lambda rank: [Item(number) for number in range(rank, SIZE, 2)],
    "a stream of objects": lambda rank: Items(range(rank, SIZE, 2)),
    "a stream of objects with tensors": lambda rank: Mapped(ROWS[mine(rank)]),
}


def drawn(rank: int) -> torch.Tensor:
    return torch.randn(SIZE // 2, 4, generator=torch.Generator().manual_seed(rank))


TOLD_OF: dict[str, Callable[[int], Any]] = {
    "tensors": lambda rank: TensorDataset(ROWS[mine(rank)]),
    "an array": lambda rank: ROWS.numpy()[mine(rank)],
    "a tensor": lambda rank: ROWS[mine(rank)],
    "tensors in attributes": lambda rank: Holds((ROWS[mine(rank)], torch.ones(SIZE // 2))),
    "pairs": lambda rank: [*zip(ROWS[mine(rank)], LABELS[mine(rank)], strict=True)],
    "objects with floats": lambda rank: [Item(float(row[0])) for row in ROWS[mine(rank)]],
    "a frame numbered anew": lambda rank: Holds(frame()[mine(rank)].reset_index(drop=True)),
    "a table of numbers": lambda rank: datasets.Dataset.from_dict({"x": ROWS.tolist()}).shard(
        2, rank
    ),
    "random numbers that nobody has seeded": lambda rank: TensorDataset(drawn(rank)),
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
    assert len(told) == 2  # one for each rank
    assert all("seed it alike" in text and "rank(s) 1" in text for text in told)


@pytest.mark.parametrize("case", RIGHT)
def test_ranks_with_the_same_samples_are_left_in_peace(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    shared(RIGHT[case])
    assert not caplog.records


def test_a_run_is_told_once_and_not_in_each_epoch(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: Any) -> None:
        assignment = ShardAssignment(2, range(group.rank, group.rank + 1), 0)
        loader = DataLoader(TOLD_OF["tensors"](group.rank), batch_size=4)
        sharded = ShardedLoader(loader, assignment, parts=BatchParts.BY_SHARD)
        for epoch in range(3):
            sharded.agree(group, epoch)

    run_ranks(2, body)
    assert len(caplog.records) == 2
