# SPDX-License-Identifier: Apache-2.0
"""Ranks that agree on positions read the same samples only if the positions mean the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    random_split,
)

from lockstep.data import BatchParts, ShardAssignment, ShardedLoader
from lockstep.data.data_order_check import check_same_plan
from lockstep.data.shard_batch_size import split_batch_size
from lockstep.errors import DataOrderError

NAMES = [f"/data/images/{number:03}.png" for number in range(40)]


class Images(Dataset[Any]):
    """Files in the order in which a host lists them."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was read")


def shuffled(rank: int) -> list[int]:
    return torch.randperm(40, generator=torch.Generator().manual_seed(rank)).tolist()


def files(rank: int) -> Dataset[Any]:
    return Images([NAMES[number] for number in shuffled(rank)])


def split(rank: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(rank)
    return random_split(Images(NAMES), [30, 10], generator=generator)[0]


def parts(rank: int) -> Dataset[Any]:
    return ConcatDataset([Images(NAMES), Subset(Images(NAMES), torch.tensor(shuffled(rank)))])


def rows(rank: int) -> Dataset[Any]:
    labels = torch.tensor(shuffled(rank))
    return TensorDataset(torch.randn(40, 3), labels)  # computed on another kind of processor


def check(datasets: list[Dataset[Any]]) -> None:
    check_loaders([DataLoader(dataset, batch_size=4, shuffle=True) for dataset in datasets])


def check_loaders(loaders: list[DataLoader[Any]]) -> None:
    sharded = [
        ShardedLoader(
            loader, ShardAssignment(2, range(rank, rank + 1), 0), parts=BatchParts.BY_SHARD
        )
        for rank, loader in enumerate(loaders)
    ]
    check_same_plan([loader.fingerprint(0) for loader in sharded])


@pytest.mark.parametrize("dataset_of", [files, split, parts, rows])
def test_a_dataset_that_differs_by_rank_is_refused(dataset_of: Callable[[int], Any]) -> None:
    check([dataset_of(0), dataset_of(0)])
    with pytest.raises(DataOrderError, match="different datasets"):
        check([dataset_of(0), dataset_of(1)])


def test_copies_of_the_files_at_another_place_are_the_same_data() -> None:
    elsewhere = [name.replace("/data", "/scratch/of/this/host") for name in NAMES]
    check([Images(NAMES), Images(elsewhere)])


class Buckets:
    """Batches that the user's own sampler makes, of the size that it is given."""

    def __init__(self, size: int, samples: int) -> None:
        self.size, self.samples = size, samples

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __iter__(self) -> Any:
        return iter(torch.arange(self.samples).split(int(self.size)))


def buckets(size: int, samples: int) -> DataLoader[Any]:
    return DataLoader(range(samples), batch_sampler=Buckets(size, samples))


def lists(size: int, samples: int) -> DataLoader[Any]:
    sampler = BatchSampler(SequentialSampler(range(samples)), size, drop_last=False)
    return DataLoader(range(samples), sampler=sampler, batch_size=None)


@pytest.mark.parametrize("samples", [50, 1000])  # of 1000, the lengths differ as well
@pytest.mark.parametrize("make", [buckets, lists])
def test_a_share_of_the_batch_size_that_differs_by_rank_is_named_as_the_cause(
    make: Callable[[int, int], DataLoader[Any]], samples: int
) -> None:
    shares = [split_batch_size(21, 2, rank) for rank in range(2)]
    with pytest.raises(DataOrderError, match=r"21 samples .*\n.*whole // num_shards") as raised:
        check_loaders([make(share, samples) for share in shares])
    assert "seeded per process" not in str(raised.value)
    check_loaders([make(share.whole // 2, samples) for share in shares])
    check_loaders([make(split_batch_size(20, 2, rank), samples) for rank in range(2)])
