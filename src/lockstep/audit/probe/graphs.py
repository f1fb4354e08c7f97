# SPDX-License-Identifier: Apache-2.0
"""Autograd's graph of a loss, and operations that are looked for in it later.

Those are known by their marks: whoever holds an operation holds the graph below it, with all that
was saved there, and an evaluation that forgot ``no_grad`` would keep that of each batch.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

_NODES: Final = 5000


class Mark(NamedTuple):
    """What tells one operation from another: its number, which counts per thread, and its name."""

    number: int
    name: str


def mark_of(node: Any) -> Mark:
    """The mark of an operation, which is a node of a graph or the context of a Function."""
    return Mark(int(node._sequence_nr()), str(node.name()))


class Graph:
    """The operations that a result was computed by, the nearest ones if there are very many."""

    def __init__(self, root: Any) -> None:
        self.nodes: set[Any] = set()
        waiting = [root]
        while waiting and len(self.nodes) < _NODES:
            node = waiting.pop()
            if node is None or node in self.nodes:
                continue
            self.nodes.add(node)
            waiting.extend(fn for fn, _ in node.next_functions)
        self._by_number = {node._sequence_nr(): node for node in self.nodes}

    def find(self, mark: Mark) -> Any:
        """The operation with that mark; None if it is not one of these."""
        node = self._by_number.get(mark.number)
        return node if node is not None and node.name() == mark.name else None
