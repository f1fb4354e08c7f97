# SPDX-License-Identifier: Apache-2.0
"""Which gradients travel together."""

import pytest
import torch

from lockstep.sync.buckets import Layout, Slot

CAP = 4000


def buckets(*sizes: int) -> list[list[int]]:
    """The bytes of every gradient, bucket by bucket; `sizes` in order of backward."""
    parameters = [torch.empty(size // 4) for size in reversed(sizes)]
    slots = [Slot(number, f"p{number}", param) for number, param in enumerate(parameters)]
    return [
        [slot.param.numel() * 4 for slot in bucket.slots] for bucket in Layout(slots, CAP).buckets
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((400,) * 12, [[400] * 10, [400] * 2]),
        ((400, 400, 3800, 400), [[400, 400], [3800], [400]]),
        ((9000, 9000), [[9000], [9000]]),
    ],
)
def test_a_bucket_grows_to_its_cap(sizes, expected):
    assert buckets(*sizes) == expected


def test_a_large_gradient_does_not_wait_for_the_layer_below():
    # bias and weight of three layers; under the cap alone the second layer would be kept back
    # by the first one's bias, which is there only when backward has ended
    assert buckets(8, 1200, 8, 2400, 8, 1200) == [[8, 1200], [8, 2400], [8, 1200]]


def test_the_last_gradient_needs_no_empty_bucket_behind_it():
    assert buckets(400, 1200) == [[400, 1200]]


@pytest.mark.parametrize(
    ("weight", "divisor"),
    [(12.0, 12.0), (0.5, 0.5), (1.0 + 2**-22, 1.0), (1.0 + 2**-20, 1.0 + 2**-20)],
)
def test_what_gradients_are_divided_by_is_one_number_on_ranks_that_read_it_and_others(
    weight, divisor
):
    layout = Layout([Slot(0, "p", torch.empty(3))], CAP)
    layout.sums_on_device.zero_()
    layout.sums_on_device[0] = weight
    assert layout.divisor.item() == divisor
    # A rank that has read the sum leaves the division out where the others divide by 1.
    assert layout.is_unit_weight(layout.read_sums().weight) == (divisor == 1.0)
