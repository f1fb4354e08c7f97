# SPDX-License-Identifier: Apache-2.0
"""How messages call a parameter: as the user does, with a position where two models need it."""

import copy

import pytest
import torch
from torch import nn

import lockstep
from lockstep.sync.local_parameters import is_local
from lockstep.sync.synced_tensors import find_synced_tensors
from lockstep.sync.tensor_bits import sum_of_bits


class Weighing(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        ([nn.Linear(2, 1)], ["weight", "bias"]),
        ([nn.Linear(2, 1), nn.MSELoss()], ["weight", "bias"]),
        ([nn.Linear(2, 1), Weighing()], ["[0].weight", "[0].bias", "[1].scale"]),
        ([nn.ReLU(), nn.Linear(2, 1), Weighing()], ["[1].weight", "[1].bias", "[2].scale"]),
    ],
    ids=["one_model", "with_a_plain_criterion", "with_a_criterion_that_learns", "positions_stay"],
)
def test_a_position_is_said_only_where_several_modules_hold_tensors(modules, names):
    assert [*find_synced_tensors(modules).parameters] == names


def test_a_deep_copy_of_a_local_module_is_local():
    model = nn.Sequential(nn.Linear(2, 3), lockstep.local(nn.BatchNorm1d(3)))
    copied = copy.deepcopy(model)
    found = find_synced_tensors([copied])
    assert [*found.parameters] == ["0.weight", "0.bias"]
    assert not found.buffers
    assert is_local(copied[1].weight), "an optimizer's check asks the tensor, not its module"


def test_buffers_of_a_criterion_count_as_tensors():
    found = find_synced_tensors([nn.Linear(2, 3), nn.CrossEntropyLoss(weight=torch.ones(3))])
    assert [*found.parameters] == ["[0].weight", "[0].bias"]


def test_the_bits_of_a_view_that_begins_in_the_middle_of_a_word():
    whole = torch.arange(9, dtype=torch.bfloat16)
    assert sum_of_bits(whole[1:5]) == sum_of_bits(whole[1:5].clone())
    assert sum_of_bits(whole[1:5]) != sum_of_bits(whole[2:6])


def test_the_bits_of_rows_in_another_order_are_others():
    whole = torch.randn(300, 1000)  # of more than one piece
    for rows in ([1, 0, *range(2, 300)], [*range(1, 300), 0], [299, *range(1, 299), 0]):
        assert sum_of_bits(whole[rows]) != sum_of_bits(whole)
    assert sum_of_bits(torch.zeros(300, 1000)) == sum_of_bits(torch.empty(0)) == 0


@pytest.mark.parametrize(("device", "buffers"), [("cpu", ["own"]), ("meta", [])])
def test_a_buffer_that_is_none_is_one_where_ranks_can_tell_each_other_that_it_is_filled(
    device, buffers
):
    """An accelerator's ranks would wait for the device; torch's own layers fill none."""
    model = Weighing().to(device)
    model.register_buffer("own", None)
    model.norm = nn.BatchNorm1d(3, track_running_stats=False)
    assert [*find_synced_tensors([model]).buffers] == buffers
