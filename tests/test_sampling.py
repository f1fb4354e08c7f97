# SPDX-License-Identifier: Apache-2.0
"""The sample of a table holds each value of each parameter, in few cells."""

from itertools import product

import pytest
from tests.sampling import sample_of


@pytest.mark.parametrize("sizes", [(3,), (3, 2), (5, 3, 4), (4, 1, 4, 2)])
def test_every_value_and_no_more_cells_than_the_longest_axis(sizes):
    cells = product(*(range(size) for size in sizes))
    table = {cell: {(str(axis), value) for axis, value in enumerate(cell)} for cell in cells}
    chosen = sample_of(table)
    assert len(chosen) == max(sizes)
    for axis, size in enumerate(sizes):
        assert {cell[axis] for cell in chosen} == set(range(size))


def test_values_are_mixed_also_where_a_short_axis_is_through():
    cells = product("abcdef", "xyz")
    table = {cell: set(zip("01", cell, strict=True)) for cell in cells}
    others = sorted(other for _, other in sample_of(table))
    assert others == ["x", "x", "y", "y", "z", "z"]


def test_cells_that_are_not_there_are_done_without():
    table = {"ax": {("0", "a"), ("1", "x")}, "bx": {("0", "b"), ("1", "x")}}
    assert sample_of(table) == {"ax", "bx"}


def test_the_cell_with_the_most_new_values_comes_first():
    a, x, y = ("0", "a"), ("1", "x"), ("2", "y")
    assert sample_of({"few": {a}, "more": {a, x}, "most": {a, x, y}}) == {"most"}


def test_an_empty_table():
    assert sample_of({}) == set()
