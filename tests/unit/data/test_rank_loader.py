# SPDX-License-Identifier: Apache-2.0
"""What a program sees of a `lockstep.data.shard_loader.RankLoader`: its batches, and its fields."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.data import RankLoader, shard_loader


class Ranks:
    """Stands for a process group: all that is asked of it is a rank and a size."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def ranks_of(make: object, count: int = 2) -> list[RankLoader]:
    return [shard_loader(make(), group=Ranks(rank, count)) for rank in range(count)]


def mixed(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch with the share of a mixup, which belongs to no sample."""
    return {"x": torch.stack(rows), "share": torch.tensor(0.25)}


def test_a_number_of_the_whole_batch_is_left_to_a_rank_without_rows() -> None:
    """The epoch ended with LS502 there."""
    one, other = ranks_of(lambda: DataLoader(torch.arange(3), batch_size=1, collate_fn=mixed))
    assert len(list(one)) == 2
    last = list(other)[-1]
    assert (last["x"].shape, last["share"].item()) == ((0,), 0.25)


@pytest.mark.parametrize("count", [1, 2])
def test_an_empty_ready_batch_is_a_ranks_own(count: int) -> None:
    """It was taken for one that the rank was lent, and refused."""
    shapes = [(2, 4), (0, 4), (0, 4), (3, 4)]
    batches = [[torch.zeros(shape), torch.ones(shape)] for shape in shapes]
    ranks = ranks_of(lambda: batches, count)
    given = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert [[tuple(each.shape) for each in batch] for batch in given] == [[s, s] for s in shapes]


def shuffled() -> DataLoader:
    return DataLoader(torch.arange(8), batch_size=2, shuffle=True)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("batch_size", "loader.loader.batch_size"),
        ("sampler", r"loader.loader.sampler"),
        ("collate_fn", "loader.loader.collate_fn"),
    ],
)
def test_a_field_of_the_users_loader_says_where_it_is(name: str, fix: str) -> None:
    loader = shard_loader(shuffled())
    with pytest.raises(AttributeError, match=fix):
        getattr(loader, name)
    with pytest.raises(AttributeError, match=fix):  # it would change nothing
        setattr(loader, name, None)
    assert not hasattr(loader, name)


def test_a_samplers_set_epoch_is_the_loaders() -> None:
    """The line that each script for DDP has."""
    sampler = torch.utils.data.DistributedSampler(range(8), 1, 0)
    loader = shard_loader(DataLoader(torch.arange(8), batch_size=2, sampler=sampler))
    with pytest.raises(AttributeError, match=r"loader\.set_epoch\(epoch\)"):
        loader.sampler.set_epoch(1)


def test_what_no_loader_has_is_an_ordinary_attribute() -> None:
    loader = shard_loader(shuffled())
    loader.purpose = "train"
    assert loader.purpose == "train"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        loader.nothing  # noqa: B018
    assert copy.copy(loader).purpose == "train"
