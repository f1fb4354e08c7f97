# SPDX-License-Identifier: Apache-2.0
"""`@pytest.mark.sampled`: of a table, `make test` runs a few cells that hold every value."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import pytest

Value = tuple[str, object]
"""A parameter's name, and one of its values."""

Cell = TypeVar("Cell", bound=Hashable)


def sample_of(table: Mapping[Cell, set[Value]]) -> set[Cell]:
    """A few cells that hold each value of each parameter, and mix them.

    Greedy: always the cell with the most values that are not held yet, and of those the one whose
    values are held the fewest times.
    """
    left = set[Value]().union(*table.values())
    held: Counter[Value] = Counter()
    chosen: set[Cell] = set()
    while left:
        best = min(
            table, key=lambda cell: (-len(table[cell] & left), sum(held[v] for v in table[cell]))
        )
        chosen.add(best)
        held.update(table[best])
        left -= table[best]
    return chosen


def mark_the_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Marks the cells of each `sampled` table that are not in its sample as slow."""
    tables: dict[object, dict[pytest.Function, set[Value]]] = defaultdict(dict)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        # A cell that is slow by itself is none that the sample could be made of.
        if isinstance(item, pytest.Function) and "sampled" in marks and "slow" not in marks:
            tables[item.function][item] = _values_of(item)
    for table in tables.values():
        for item in table.keys() - sample_of(table):
            item.add_marker(pytest.mark.slow)


def _values_of(item: pytest.Function) -> set[Value]:
    """The values of the test's parameters; of one that has no hash, which object it is."""
    return {
        (name, value if _has_hash(value) else id(value))
        for name, value in item.callspec.params.items()
    }


def _has_hash(value: object) -> bool:
    """`isinstance(value, Hashable)` says so of a tuple that holds a list, too."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
