# SPDX-License-Identifier: Apache-2.0
"""A `__len__` that fails: the data has no length, as torch's own loop would never have asked.

Lengths are those of `lockstep.data.global_batches`.
"""

import pytest
import torch
from tests.unit.trainer.programs import Regression, Stream, problem, trainer
from torch.utils.data import DataLoader, Sampler

from lockstep.data.global_batches import length_or_none


def failing(error: Exception):
    def length(self):
        raise error

    return length


LENGTHS = {
    "RuntimeError": failing(RuntimeError("the reader is not open yet")),
    "ValueError": failing(ValueError("no index file")),
    "OverflowError": failing(OverflowError("endless")),
    "AttributeError": failing(AttributeError("_size")),
    "negative": lambda self: -1,
    "too large": lambda self: 10**20,
    "no number": lambda self: 2.5,
}


class Order(Sampler):
    def __iter__(self):
        return iter(range(len(problem()[0])))


def of_stream(length):
    return DataLoader(type("Sized", (Stream,), {"__len__": length})(), 6)


def of_sampler(length):
    data = torch.utils.data.TensorDataset(*problem())
    return DataLoader(data, 6, sampler=type("Sized", (Order,), {"__len__": length})())


def of_ready_batches(length):
    def read(self):
        return iter(list(of_stream(failing(TypeError()))))

    return type("Sized", (), {"__len__": length, "__iter__": read})()


@pytest.mark.parametrize("make", [of_stream, of_sampler, of_ready_batches])
@pytest.mark.parametrize("length", LENGTHS)
def test_data_whose_length_fails_is_read_to_its_end(length, make):
    loader = make(LENGTHS[length])
    assert length_or_none(loader) is None

    class Reads(Regression):
        def data(self):
            return loader

    with trainer(Reads) as one:
        for _ in range(2):
            assert one.train()["num_samples"] == 22
