# SPDX-License-Identifier: Apache-2.0
"""Backwards in which gradients have crossed ranks, all ranks counting alike.

A backward in which gradients travel between ranks compares the ranks' weights before they do. A
program that weighs the gradients itself afterwards (`average_gradients`) would weigh what has
crossed by the weight of the wrong rank. So the backward notes here where it crosses, and
`average_gradients` asks whether its parameters lie behind. A note holds until an optimizer has
changed the parameters there.

To walk the graph in each backward takes a microsecond for each of its nodes, and most programs
never ask. So a note has the first parameter that the graph leads to, and its node, which lives as
long as the loss: only `have_crossed` walks. Of a loss that was deleted before, only that parameter
is known; and a reentrant checkpoint hides its parameters from the graph.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep._torch_compat import version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_notes: Any = WeakTensorKeyDictionary()
"""The first parameter behind a crossing, with its version then, and a reference to the node."""


def note_crossing(node: Any) -> None:
    """Note that gradients have crossed ranks in `node` of a graph, whose backward runs."""
    for leaf in _leaves(node):
        _notes[leaf] = version_of(leaf), weakref.ref(node)
        return


def have_crossed(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the present gradients of some of `parameters` have crossed ranks."""
    asked = set(map(id, parameters))
    for first, (version, reference) in list(_notes.items()):
        if version_of(first) != version:
            continue
        node = reference()
        behind = (first,) if node is None else _leaves(node)
        if any(id(leaf) in asked for leaf in behind):
            return True
    return False


def _leaves(node: Any) -> Iterator[torch.Tensor]:
    """The parameters to which the gradients lead that `node` passes on."""
    seen, waiting = {node}, [node]
    while waiting:
        for before, _ in waiting.pop().next_functions:
            if before is None or before in seen:
                continue
            seen.add(before)
            waiting.append(before)
            leaf = getattr(before, "variable", None)  # of the nodes that accumulate gradients
            if isinstance(leaf, torch.Tensor):
                yield leaf
