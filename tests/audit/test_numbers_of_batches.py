# SPDX-License-Identifier: Apache-2.0
"""What stands for a batch and for its rows is read from few elements, and the tensors stay free."""

import pytest
import torch

from lockstep.audit.probe.batches import each_row, read_on

KINDS = [torch.int64, torch.float64, torch.float32, torch.bool, torch.complex128]


def _numbers(kind, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul(9).to(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_can_still_be_resized(kind):
    held = _numbers(kind, 6, 4)
    read_on(0, held)
    each_row(held)
    held.resize_(20, 4)
    assert held.untyped_storage().resizable()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6, 3, 4), (6, 200, 300)])
def test_the_order_in_memory_does_not_matter(kind, shape):
    held = _numbers(kind, *shape)
    other = held.transpose(0, 2).contiguous().transpose(0, 2)
    assert not other.is_contiguous()
    assert read_on(0, other) == read_on(0, held)
    assert each_row(other) == each_row(held)


def test_a_large_tensor_is_not_copied_for_few_numbers():
    held = torch.zeros(1).expand(1 << 40, 8).transpose(0, 1)  # as much memory as no machine has
    assert read_on(0, held) == read_on(0, torch.zeros(8, 512))
    assert len(each_row(held)) == 8


def test_rows_of_one_number_are_told_apart():
    assert len(set(each_row(torch.arange(5)))) == 5
