# SPDX-License-Identifier: Apache-2.0
"""`lockstep.operator.group_settings`: which settings a rank without samples takes over."""

import json

import numpy as np
import pytest
import torch

from lockstep.operator.group_settings import read_group_settings, share_group_settings


class Told:
    """A group in which the other rank has sent `theirs`."""

    def __init__(self, theirs):
        self.theirs, self.sent = theirs, None

    def exchange(self, value):
        self.sent = json.loads(json.dumps(value))
        return [self.theirs, self.sent]


def optimizer(**settings):
    made = torch.optim.Adam([torch.zeros(1)], lr=0.1)
    made.param_groups[0].update(settings)
    return made


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.25),
        (np.float32(0.25), 0.25),
        (np.float64(0.25), 0.25),
        (np.array(0.25), 0.25),
        (torch.tensor(0.25), 0.25),
        (np.int64(2), 2),
        (True, True),
        (np.bool_(True), True),
    ],
)
def test_numbers_of_any_kind_are_taken_over(value, expected):
    one, idle = optimizer(), optimizer()
    before = read_group_settings([one])
    one.param_groups[0].update(lr=value, betas=(np.float32(0.5), 0.75))
    share_group_settings(group := Told(None), [one], before, has_computed=True)
    share_group_settings(Told(group.sent), [idle], before, has_computed=False)
    settings = idle.param_groups[0]
    assert (settings["lr"], settings["betas"]) == (expected, (0.5, 0.75))
    assert type(settings["lr"]) is type(expected)


@pytest.mark.parametrize("value", [None, "cosine", np.zeros(2), (1, None)])
def test_what_is_no_number_stays_each_rank_s_own(value):
    assert "kind" not in read_group_settings([optimizer(kind=value)])[0][0]
