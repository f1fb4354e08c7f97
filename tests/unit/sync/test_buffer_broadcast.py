# SPDX-License-Identifier: Apache-2.0
"""Sparse, quantized, nested, expanded and conjugate tensors on the ways that buffers take."""

import pytest
import torch
from torch import nn

from kinds import KINDS, NESTED
from lockstep.serialization import join, pack, split, unpack
from lockstep.sync import buffer_places
from lockstep.sync.tensor_bits import same_bits
from lockstep.tensor_copies import TensorCopies, write_into
from lockstep.worker.tensor_pool import TensorPool

# Torch says so once in a process, whoever makes such a tensor first.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

ALL = pytest.mark.parametrize("make", [*KINDS.values(), *NESTED.values()], ids=[*KINDS, *NESTED])


def holding(tensor):
    module = nn.Module()
    module.register_buffer("held", tensor)
    return module


@ALL
def test_bits_are_told_apart(make):
    one, other = make(2.0), make(3.0)
    assert same_bits(one, make(2.0))
    assert same_bits(one, one.clone())
    assert not same_bits(one, other)
    assert not same_bits(one, torch.zeros(3))
    assert not same_bits(torch.zeros(3), one)


def test_other_numbers_of_parts_are_other_bits():
    one, two = (torch.nested.nested_tensor([torch.ones(2)] * count) for count in (1, 2))
    assert not same_bits(one, two)
    assert not same_bits(torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse())


@ALL
def test_what_was_kept_comes_back_in_the_object_that_was_there(make):
    held, plain, kept = make(2.0), torch.zeros(3), TensorCopies()
    for value in (3.0, 2.0):  # the second time into memory of the first
        write_into(held, make(value))
        kept.take([held, plain, torch.ones(2)])
    memory = kept.values[1].data_ptr()
    write_into(held, make(4.0))
    plain.add_(1)
    kept.restore([held, plain, torch.zeros(2)])
    assert same_bits(held, make(2.0))
    assert plain.tolist() == [0, 0, 0]
    kept.take([held, plain, torch.ones(2)])
    assert kept.values[1].data_ptr() == memory
    assert same_bits(kept.values[0], held)


@ALL
def test_a_buffer_that_changed_gets_the_value_and_another_one_stays(make):
    held = make(2.0)
    module = holding(held)
    (place,) = buffer_places([module])
    with torch.no_grad():
        place.put(make(2.0))
        assert module.held is held
        place.put(make(3.0))
    assert same_bits(module.held, make(3.0))


def test_one_in_the_place_of_a_saved_buffer_lies_in_memory_alike():
    module = holding(torch.ones(2, 3).t())
    (place,) = buffer_places([module])
    parameter = torch.ones(3, 2, requires_grad=True)
    product = parameter * module.held  # its graph saves the buffer
    with torch.no_grad():
        place.put(torch.full((3, 2), 2.0))
    product.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(3, 2))
    assert torch.equal(module.held, torch.full((3, 2), 2.0))
    assert module.held.stride() == (1, 3)


@ALL
def test_a_state_is_handed_over(make):
    structure, buffers = split({"a": make(2.0), "b": [torch.ones(3)]})
    sizes = [buffer.numel() for buffer in buffers]
    found = join(structure, unpack(pack(buffers), sizes))
    assert same_bits(found["a"], make(2.0))
    assert found["b"][0].tolist() == [1, 1, 1]


@ALL
def test_copies_of_a_state_use_memory_again(make):
    pool = TensorPool()
    for value in (2.0, 3.0):
        copied = pool.copy_of(make(value))
        assert same_bits(copied, make(value))
        pool.put_back([copied])
