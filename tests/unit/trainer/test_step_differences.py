# SPDX-License-Identifier: Apache-2.0
"""Two lines of logs are compared by what both of them know."""

import math

import pytest

from lockstep.trainer.step_differences import compare_lines


def line(shards="", **metrics):
    return {"step": 3, "at": [0, 2], "lr": [0.1], "metrics": metrics, "shards": shards, "w": []}


@pytest.mark.parametrize(("loss", "differs"), [(1.0, False), (1.0 + 1e-8, False), (1.1, True)])
def test_means_tell_where_one_line_alone_has_checksums(loss, differs):
    lines = line("12ab34cd", train_loss=1.0), line(train_loss=loss)
    for pair in (lines, lines[::-1]):
        compared = compare_lines(*pair)
        assert (compared.num_hashes, compared.num_means) == (0, 1)
        assert bool(compared.differences) is differs


def test_checksums_tell_where_both_have_them():
    compared = compare_lines(line("12ab34cd", loss=1.0), line("12ab0001", loss=2.0))
    assert (compared.num_hashes, compared.num_means) == (2, 0)
    (difference,) = compared.differences
    assert "shard 1" in difference.what


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_twice_is_no_difference(value):
    assert not compare_lines(line(loss=value), line(loss=value)).differences
    assert compare_lines(line(loss=value), line(loss=1.0)).differences
