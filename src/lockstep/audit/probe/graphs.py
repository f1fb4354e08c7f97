# SPDX-License-Identifier: Apache-2.0
"""Autograd's graph of a loss: operations that are looked for in it later, and what they keep.

Operations are known by their marks: whoever holds one holds the graph below it, with all that
was saved there, and an evaluation that forgot ``no_grad`` would keep that of each batch.

Of what an operation keeps for its backward only its own is read. Where the program packs saved
tensors by hooks, to read one is to unpack it: with ``torch.utils.checkpoint`` a whole forward runs
again, and what that draws, counts or communicates happens once more.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

_NODES: Final = 5000
_RAW: Final = "_raw_saved_"


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


def saved(node: Any, name: str) -> Any:
    """What `node` keeps under `name`; None if there is nothing, or if the program has packed it."""
    return None if _is_packed(node, name) else getattr(node, f"_saved_{name}", None)


def each_saved(node: Any) -> Iterator[torch.Tensor]:
    """All tensors that `node` keeps, and has not packed."""
    kind: Any = type(node)
    for name in _names(kind):
        held = saved(node, name)
        for tensor in held if isinstance(held, tuple | list) else (held,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


@functools.lru_cache(maxsize=512)
def _names(kind: Hashable) -> tuple[str, ...]:
    """By the type of the operation: there are few of them, and many operations."""
    return tuple(n.removeprefix(_RAW) for n in dir(kind) if n.startswith(_RAW))


def _is_packed(node: Any, name: str) -> bool:
    raw = getattr(node, _RAW + name, None)
    parts = raw if isinstance(raw, tuple | list) else (raw,)
    return any(getattr(part, "unpack_hook", None) is not None for part in parts)
