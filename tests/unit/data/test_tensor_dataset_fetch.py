# SPDX-License-Identifier: Apache-2.0
"""A selected batch equals what torch collates from the samples; else none is selected."""

from collections.abc import Sequence

import pytest
import torch
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lockstep.data.tensor_dataset_fetch import _DTYPES, select_batch

PLACES = [3, 0, 3, 7]


def _tensors(rows=8):
    source = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, 3, generator=source),
        torch.randint(9, (rows,), generator=source),
        torch.rand(rows, 1, 4, 4, generator=source) > 0.5,
        torch.randn(rows, 0, 2, generator=source),
        torch.randn(rows, 2, 5, generator=source).to(torch.bfloat16),
        *(torch.arange(rows).to(dtype) for dtype in sorted(_DTYPES, key=str)),
    )


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(*_tensors()),
        Subset(TensorDataset(*_tensors(12)), [11, 1, 9, 2, 10, 0, 3, 4]),
        Subset(Subset(TensorDataset(*_tensors(12)), range(2, 12)), [9, 8, 7, 6, 5, 4, 3, 2]),
    ],
    ids=["whole", "a part", "a part of a part"],
)
def test_they_are_what_torch_collates(dataset):
    expected = default_collate([dataset[place] for place in PLACES])
    taken = select_batch(dataset, PLACES)
    assert type(taken) is type(expected)
    for one, other in zip(taken, expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Own(torch.Tensor):
    pass


def _with_own_reader(dataset):
    dataset.__getitems__ = lambda indices: [dataset[0] for _ in indices]
    return dataset


@pytest.mark.parametrize(
    ("dataset", "indices"),
    [
        (_with_own_reader(TensorDataset(*_tensors())), PLACES),
        (_with_own_reader(Subset(TensorDataset(*_tensors()), range(8))), PLACES),
        (TensorDataset(torch.arange(8).to(torch.uint16)), PLACES),
        (TensorDataset(torch.arange(8) * 1j), PLACES),
        (Doubled(*_tensors()), PLACES),
        (Subset(Doubled(*_tensors()), range(8)), PLACES),
        (TensorDataset(_tensors()[0].as_subclass(Own)), PLACES),
        (TensorDataset(_tensors()[0].requires_grad_()), PLACES),
        (TensorDataset(_tensors()[0].t().contiguous().t()), PLACES),
        (TensorDataset(*_tensors()), [*PLACES, -1]),
        (TensorDataset(*_tensors()), [8]),
        (TensorDataset(*_tensors()), [torch.tensor(1)]),
        (TensorDataset(*_tensors()), [True]),
        (TensorDataset(*_tensors()), []),
        (list(range(8)), PLACES),
    ],
)
def test_what_is_not_certain_is_read_sample_by_sample(dataset, indices):
    assert select_batch(dataset, indices) is None


@pytest.mark.parametrize("kind", [torch.Tensor, tuple, (tuple, list), Sequence])
def test_a_way_of_collating_that_a_program_has_taught_torch_is_respected(monkeypatch, kind):
    dataset = TensorDataset(*_tensors())
    monkeypatch.setitem(default_collate_fn_map, kind, lambda batch, **_: batch)
    assert select_batch(dataset, PLACES) is None
