# SPDX-License-Identifier: Apache-2.0
"""What may be drawn is told from positions, masks and constants."""

import pytest
import torch

from lockstep.audit.probe.arguments import arguments_of
from lockstep.audit.probe.probe import Probe


def _is_scattered(tensor):
    (noted,) = arguments_of(Probe(), (tensor,))
    return noted["scattered"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(64),
        torch.arange(64).flip(0),
        torch.arange(16).repeat(4, 1),
        torch.full((12,), 7),
        torch.ones(8, 16).tril().bool(),
        torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1]),
        torch.linspace(0.0, 1.0, 32),
        torch.randn(1, 64),
        torch.randn(4),
        torch.tensor(3.0),
        torch.randn(3, 4).to_sparse(),
    ],
)
def test_what_is_ordered_or_shared_by_rows_is_not(tensor):
    assert not _is_scattered(tensor)


@pytest.mark.parametrize(
    "tensor",
    [torch.randint(100, (64,)), torch.randn(6, 4), torch.randn(8, 3, 4, 4).to(torch.bfloat16)],
)
def test_numbers_in_no_order_may_be(tensor):
    assert _is_scattered(tensor)


def test_later_steps_are_left_alone():
    probe = Probe()
    probe.steps_done = 16
    assert arguments_of(probe, (torch.randn(6, 4),)) == []
