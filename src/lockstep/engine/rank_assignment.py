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
    """Order `items` by node; items of one node, and the nodes, keep their given order.

    A ring of all ranks then crosses the network once for each node. Workers on the driver's node
    come first, so that rank 0 survives the loss of any other node.
    """
    by_node: dict[str, list[Item]] = {this_node(): []}
    for item in items:
        by_node.setdefault(node_of(item), []).append(item)
    return [item for group in by_node.values() for item in group]


def local_ranks(nodes: Sequence[str]) -> list[int]:
    """The index of each rank among the ranks on its node."""
    seen: Counter[str] = Counter()
    ranks: list[int] = []
    for node in nodes:
        ranks.append(seen[node])
        seen[node] += 1
    return ranks
