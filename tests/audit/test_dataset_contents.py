# SPDX-License-Identifier: Apache-2.0
"""What stands for a dataset: equal for equal ones, and nothing where that cannot be told."""

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, TensorDataset

from lockstep.audit.probe.hooking import hook_in
from lockstep.audit.probe.probe import Probe
from lockstep.dataset_contents import contents_of, identity_of


class Listed(Dataset):
    """Holds `held`, and raises where it is asked for a sample."""

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return len(self.held)

    def __getitem__(self, index):
        raise AssertionError("the audit read a sample")


NAMES = [f"{number:03}.png" for number in range(40)]
WHOLE = {
    "names": NAMES,
    "paths": [Path("here") / name for name in NAMES],
    "pairs": [(name, number % 3) for number, name in enumerate(NAMES)],
    "records": [{"id": number, "sound": torch.zeros(3)} for number in range(40)],
    "numbers": list(range(40)),
}


class Drawing(list):
    """Draws where it is asked for an element."""

    def __getitem__(self, index):
        return torch.rand(()) + super().__getitem__(index)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_part_is_told_from_the_other_part_and_not_from_a_copy(kind):
    held = WHOLE[kind]
    part, other = Listed(held[::2]), Listed(held[1::2])
    copy = Listed(pickle.loads(pickle.dumps(held[::2])))
    assert len(contents_of(part, 20)) == 1
    assert contents_of(part, 20) == contents_of(copy, 20)
    assert contents_of(part, 20) != contents_of(other, 20)


def test_a_copy_of_the_files_elsewhere_is_the_same_dataset():
    here, there = ([f"/{place}/{name}" for name in NAMES] for place in ("node0", "node1"))
    assert contents_of(Listed(here), 40) == contents_of(Listed(there), 40)


@pytest.mark.parametrize(
    "held",
    [
        pytest.param([None] * 40, id="a cache"),
        pytest.param([object() for _ in range(40)], id="objects"),
        pytest.param(NAMES[:39], id="of another length"),
        pytest.param([number % 3 for number in range(40)], id="labels"),
        pytest.param([float(number) for number in range(40)], id="numbers that may be drawn"),
        pytest.param(torch.arange(40), id="a tensor"),
        pytest.param(Drawing(range(40)), id="a list of the program's own"),
    ],
)
def test_nothing_is_said_of_what_cannot_be_compared(held):
    before = torch.get_rng_state()
    assert contents_of(Listed(held), 40) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_functions_that_shuffle_are_pickled_while_they_are_watched():
    functions = (np.random.permutation, np.random.shuffle, random.shuffle)
    probe = Probe()
    hook_in(probe)
    try:
        watched = (np.random.permutation, np.random.shuffle, random.shuffle)
        assert pickle.loads(pickle.dumps(watched)) == watched
        np.random.permutation(12)
        order = list(range(9))
        random.shuffle(order)
        assert [each.size for each in probe.ledger.permutations] == [12, 9]
    finally:
        probe.stop()
    assert (np.random.permutation, np.random.shuffle, random.shuffle) == functions


class Held(Dataset):
    """Has what it is given as attributes, and so many samples."""

    def __init__(self, **held):
        vars(self).update(held)

    def __len__(self):
        return 40


def _pictures(seed):
    return torch.randint(256, (40, 3), generator=torch.Generator().manual_seed(seed))


IDENTITIES = {
    "tensors": lambda seed: Held(images=_pictures(seed), labels=torch.arange(40) % 2),
    "arrays": lambda seed: Held(data=_pictures(seed).numpy()),
    "a dictionary": lambda seed: Held(data={"x": _pictures(seed), "y": list(range(40))}),
    "paths": lambda seed: Held(files=[f"/data/{seed}/{name}" for name in NAMES]),
    "a folder": lambda seed: Held(root=Path("data") / str(seed), files=NAMES),
    "within another": lambda seed: Held(base=TensorDataset(_pictures(seed))),
    "joined": lambda seed: ConcatDataset([Held(x=_pictures(seed)), Held(x=_pictures(9))]),
    "a rank's own shards": lambda seed: Held(shards=[f"{seed}.tar"], names=NAMES),
    "a seed in a dictionary": lambda seed: Held(config={"seed": seed}, names=NAMES),
    "many joined": lambda seed: ConcatDataset(
        [*[Held(x=_pictures(9))] * 9, Held(x=_pictures(seed))]
    ),
    "of Hugging Face's": lambda seed: Held(_fingerprint=f"{seed:016x}"),
}


@pytest.mark.parametrize("kind", IDENTITIES)
def test_equal_datasets_are_known_and_different_ones_are_not_taken_for_one(kind):
    made = IDENTITIES[kind]
    assert identity_of(made(1)) is not None
    assert identity_of(made(1)) == identity_of(made(1))
    assert identity_of(made(1)) != identity_of(made(2))


@pytest.mark.parametrize(
    "held",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"numbers": list(range(40))}, id="numbers"),
        pytest.param({"numbers": torch.arange(40), "scale": torch.tensor(2.0)}, id="a tensor"),
        pytest.param({"labels": [number % 3 for number in range(40)]}, id="labels"),
        pytest.param({"cache": [None] * 40}, id="a cache"),
        pytest.param({"shown": NAMES[:8]}, id="of another length"),
        pytest.param({"pool": TensorDataset(torch.rand(90, 3))}, id="draws from another one"),
    ],
)
def test_a_dataset_that_computes_its_samples_has_no_identity(held):
    assert identity_of(Held(**held)) is None


def test_a_stream_has_no_identity():
    class Stream(IterableDataset):
        names = NAMES

        def __iter__(self):
            return iter(NAMES)

    assert identity_of(Stream()) is None
