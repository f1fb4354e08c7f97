# SPDX-License-Identifier: Apache-2.0
"""Generators that a dataset holds draw for a sample the same numbers, whoever reads it."""

import functools
import os
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lockstep.data.dataset_generators import DatasetGenerators
from lockstep.data.global_batches import ItemKind
from lockstep.data.seeded_dataset import Request, SeededDataset, Segment
from sharing import by_shard, share_out

of_this_module = np.random.default_rng(5)


class Flip:
    """A transform with a generator of its own."""

    def __init__(self):
        self.chance = random.Random(0)

    def __call__(self, value):
        return value + self.chance.random()


class Compose:
    def __init__(self, *steps):
        self.steps = list(steps)

    def __call__(self, value):
        return functools.reduce(lambda done, step: step(done), self.steps, value)


class Noisy(Dataset):
    """Every sample is its index and a draw from each generator."""

    of_all = random.Random(3)

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.torchs = torch.Generator().manual_seed(0)
        self.transform = Compose(abs, Flip())

    def __len__(self):
        return 26

    def __getitem__(self, index):
        draws = [self.rng.random(), float(torch.rand((), generator=self.torchs))]
        draws += [self.transform(0.0), of_this_module.random(), self.of_all.random()]
        return torch.tensor([float(index), *draws], dtype=torch.float64)


def mixing_with(generator):
    def collate(rows):
        return torch.stack(rows) + generator.random() / 1000

    return collate


def make(num_workers=0):
    collate = mixing_with(np.random.default_rng(7))
    return DataLoader(Noisy(), 3, shuffle=True, num_workers=num_workers, collate_fn=collate)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loader_workers_draw_what_the_main_process_draws(num_workers):
    alone = by_shard(share_out(make, 2, 1))
    assert by_shard(share_out(lambda: make(num_workers), 2, 1)) == alone
    for place in range(1, 6):
        assert len({row[place] for batch in alone.values() for row in batch}) == 26


def test_the_number_of_training_workers_does_not_show():
    alone = by_shard(share_out(make, 4, 1))
    assert by_shard(share_out(make, 4, 2)) == alone
    assert by_shard(share_out(make, 4, 4)) == alone


def test_a_generator_is_as_before_where_it_is_read():
    dataset = Noisy()
    before = pickle.dumps(dataset.rng), dataset.torchs.get_state()
    seeded = SeededDataset(dataset, ItemKind.SAMPLE_INDEX, torch.stack, seed=1)
    read = seeded.__getitems__(Request(0, 0, (Segment(0, [3, 4]),)))
    assert torch.equal(read, seeded.__getitems__(Request(0, 0, (Segment(0, [3, 4]),))))
    assert not torch.equal(read, seeded.__getitems__(Request(0, 1, (Segment(0, [3, 4]),))))
    assert pickle.dumps(dataset.rng) == before[0]
    assert torch.equal(dataset.torchs.get_state(), before[1])


def test_a_generator_of_a_new_epoch_is_found_and_a_copy_finds_its_own():
    dataset = Noisy()
    seeded = SeededDataset(dataset, ItemKind.SAMPLE_INDEX, torch.stack, seed=1)
    later = Request(1, 0, (Segment(0, [3, 4]),))
    seeded.__getitems__(Request(0, 0, (Segment(0, [3, 4]),)))
    dataset.rng = np.random.default_rng(9)
    other = pickle.loads(pickle.dumps(seeded))
    assert torch.equal(seeded.__getitems__(later), other.__getitems__(later))


def test_the_global_generators_are_not_taken_for_held_ones():
    """torch's own module of datasets has one among its names, and so may the program's."""
    held = [torch.default_generator, random.seed.__self__, np.random.mtrand._rand]
    found = DatasetGenerators(Subset(held, [0]))
    assert found._found == {}


def test_what_is_held_deep_within_is_found_by_where_it_is():
    subset = Subset(Noisy(), [1, 2])
    found = DatasetGenerators(subset, functools.partial(mixing_with, np.random.default_rng(7)))
    assert set(found._found) == {
        "0.dataset.rng",
        "0.dataset.torchs",
        "0.dataset.transform.steps.1.chance",
        "1.function.global of_this_module",
        "0.dataset.Noisy.of_all",
        "1.arguments.0",
    }


class Late(Dataset):
    """Makes its generator where it is read, from the operating system's entropy."""

    rng = None

    def __len__(self):
        return 26

    def __getitem__(self, index):
        if self.rng is None:
            self.rng = np.random.default_rng()
        return torch.tensor([float(index), self.rng.random(), random.random()])


class OfItsProcess(Late):
    """Replaces what it was copied with, as programs do that know of loader workers."""

    def __init__(self):
        self.rng, self.owner = np.random.default_rng(0), None

    def __getitem__(self, index):
        if self.owner != os.getpid():
            self.rng, self.owner = np.random.default_rng(), os.getpid()
        return super().__getitem__(index)


@pytest.mark.parametrize("dataset", [Late, OfItsProcess])
def test_a_generator_that_the_first_read_of_a_process_makes_is_seeded(dataset):
    """Without `persistent_workers` each epoch has new processes, which make it anew."""
    read = {
        num_workers: by_shard(
            share_out(lambda: DataLoader(dataset(), 3, num_workers=num_workers), 2, 1)  # noqa: B023
        )
        for num_workers in (0, 2)
    }
    assert read[2] == read[0]
    assert len({row[1] for batch in read[0].values() for row in batch}) == 26


def test_a_request_is_read_twice_only_where_it_has_made_a_generator():
    reads = []

    class Counted(Late):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    seeded = SeededDataset(Counted(), ItemKind.SAMPLE_INDEX, torch.stack, seed=1)
    for step in range(3):
        seeded.__getitems__(Request(0, step, (Segment(0, [step]),)))
    seeded.__getitems__(Request(1, 0, (Segment(0, [3]),)))
    assert reads == [0, 0, 1, 2, 3]
