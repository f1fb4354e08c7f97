# SPDX-License-Identifier: Apache-2.0
"""Each bit of the weights is in one part's hash, whatever the tensors look like."""

import pytest
import torch

from lockstep.tensor_copies import as_bytes
from lockstep.testing.bit_flips import flip_bit
from lockstep.weight_hashes import (
    NUM_PARTS,
    TensorSlot,
    WeightHashes,
    read_hashes,
    sum_of_mixed_lanes,
)

TENSORS = {
    "weight": torch.arange(700.0).reshape(70, 10),
    "half": torch.ones(33, dtype=torch.bfloat16),
    "strided": torch.arange(60.0).reshape(6, 10).T,
    "offset": torch.arange(41, dtype=torch.int32)[3:],
    "flag": torch.tensor([True, False, True]),
    "none": torch.empty(0),
    "meta": torch.empty(5, device="meta"),
    "double": torch.ones(9, dtype=torch.float64),
}


def hashes_of(tensors):
    slots = [TensorSlot(name, tensors, name) for name in tensors]
    return WeightHashes(lambda: slots)


def all_of(tensors):
    return read_hashes(hashes_of(tensors).take(range(NUM_PARTS)))


def flipped(tensor, place):
    """A copy with one bit of one element flipped."""
    copy = tensor.clone()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), copy.shape))
    copy.view(words[copy.element_size()])[index] ^= 1
    return copy


@pytest.mark.parametrize("name", ["weight", "half", "strided", "offset", "flag", "double"])
def test_a_flipped_bit_changes_one_part_that_names_its_tensor(name):
    before, hashes = all_of(TENSORS), hashes_of(TENSORS)
    for place in range(TENSORS[name].numel()):
        after = all_of({**TENSORS, name: flipped(TENSORS[name], place)})
        (changed,) = [
            one.part for one, other in zip(before, after, strict=True) if one.bits != other.bits
        ]
        assert name in hashes.names_in(changed)


def test_equal_bits_have_equal_hashes_whatever_their_place_in_memory():
    moved = {name: t.clone() for name, t in TENSORS.items()}
    assert all_of(moved) == all_of(TENSORS)


def test_the_norm_is_that_of_the_floating_point_numbers_in_the_part():
    squares = sum(part.norm**2 for part in all_of(TENSORS))
    floats = [t.double() for t in TENSORS.values() if t.is_floating_point() and not t.is_meta]
    assert squares == pytest.approx(sum(float(t.square().sum()) for t in floats), rel=1e-12)


def test_a_tensor_that_is_replaced_is_hashed_in_its_place():
    tensors = dict(TENSORS)
    hashes = hashes_of(tensors)
    before = read_hashes(hashes.take(range(NUM_PARTS)))
    tensors["weight"] = tensors["weight"] + 1
    assert read_hashes(hashes.take(range(NUM_PARTS))) != before
    tensors["weight"] = torch.zeros(2000)  # of another size: all parts are others
    assert read_hashes(hashes.take(range(NUM_PARTS))) == all_of(tensors)


def test_fewer_lanes_than_parts_leave_parts_empty():
    (part,) = all_of({"one": torch.tensor([1.0])})
    assert (part.part, part.norm) == (0, 1.0)


def hash_of(tensor):
    return int(sum_of_mixed_lanes(as_bytes(tensor)))


def test_mixed_lanes_see_places_and_pairs():
    tensor = torch.arange(1.0, 12.0)
    seen = {hash_of(tensor)}
    swapped = tensor.view(-1)[[2, 3, 0, 1, *range(4, 11)]]
    both_signs = tensor * torch.tensor([1.0, -1, 1, -1, *[1] * 7])
    last = tensor.clone()
    last[-1] += 1
    for other in (swapped, both_signs, last, tensor[:-1], torch.cat([tensor, torch.zeros(2)])):
        seen.add(hash_of(other))
    assert len(seen) == 6
    assert hash_of(tensor.clone()) in seen


def test_each_flipped_bit_changes_mixed_lanes():
    tensor = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = {hash_of(tensor)}
    for number in range(5):
        for bit in range(64):
            flipped = tensor.clone()
            flip_bit(flipped, number / 5, bit)
            seen.add(hash_of(flipped))
    assert len(seen) == 1 + 5 * 64
