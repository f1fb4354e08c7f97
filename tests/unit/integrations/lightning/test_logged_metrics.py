# SPDX-License-Identifier: Apache-2.0
"""Values that ranks log under one name, merged into one number."""

import itertools
import math

import pytest
import torch

from lockstep.integrations.lightning.logged_metrics import LoggedMetrics, merge_ranks


def merged(reduction, values):
    """The result where each rank logs one of `values`."""
    ranks = []
    for value in values:
        logged = LoggedMetrics()
        number = torch.tensor(value, dtype=torch.float64)
        logged.add("seen", number, reduction, 1.0, 0, both_levels=False)
        ranks.append(logged.to_plain())
    return merge_ranks(ranks)["seen"]


@pytest.mark.parametrize("reduction", ["min", "max", "sum", "mean"])
def test_a_nan_of_any_rank_stays(reduction):
    for values in itertools.permutations([math.nan, 1.0, 2.0]):
        assert math.isnan(merged(reduction, values)), values


def test_the_extremes_of_all_ranks():
    values = [2.0, -math.inf, 0.5, 7.0]
    assert merged("min", values) == -math.inf
    assert merged("max", values) == 7.0
    assert merged("min", values[2:]) == 0.5
