# SPDX-License-Identifier: Apache-2.0
"""The order of workers by rank, and each rank's local rank, from the nodes that they run on."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from lockstep.engine.cluster import this_node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Item = TypeVar("Item")


def group_by_node(items: Sequence[Item], node_of: Callable[[Item], str]) -> list[Item]:
    """`items` by rank: those of one node side by side, and otherwise in the order given.

    A ring of all ranks then crosses the network once for each node. Those of the driver's node come
    first: what is asked of rank 0 is asked of a process that is there as long as the driver is.
    """
    by_node: dict[str, list[Item]] = {this_node(): []}
    for item in items:
        by_node.setdefault(node_of(item), []).append(item)
    return [item for group in by_node.values() for item in group]


def local_ranks(nodes: Sequence[str]) -> list[int]:
    """Each rank's position among the ranks on its node."""
    seen: Counter[str] = Counter()
    ranks: list[int] = []
    for node in nodes:
        ranks.append(seen[node])
        seen[node] += 1
    return ranks
