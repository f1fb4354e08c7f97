# SPDX-License-Identifier: Apache-2.0
"""Backwards in which gradients have crossed ranks, all ranks counting alike.

A backward in which gradients travel between ranks compares the ranks' weights before they do. A
program that weighs the gradients itself afterwards (`average_gradients`) would weigh what has
crossed by the weight of the wrong rank. So the backward notes here where it crosses, and
`average_gradients` asks whether its parameters lie behind. A note holds as long as the gradient
that the backward has left: until ``zero_grad`` drops it, or another one takes its place.

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

from lockstep._torch_compat import call_at_end_of_task, version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_notes: Any = WeakTensorKeyDictionary()
"""A note for the first parameter behind a crossing."""


class _Note:
    """A crossing in `node`, behind which `first` is the first parameter."""

    def __init__(self, node: Any, first: torch.Tensor) -> None:
        self.node = weakref.ref(node)
        self._first = weakref.ref(first)
        self._version = version_of(first)
        self._before = _state_of(first.grad)
        self._gradient: weakref.ref[torch.Tensor] | None = None

    def note_gradient(self) -> None:
        """At the end of the backward: note the gradient that it has left."""
        first = self._first()
        gradient = None if first is None else first.grad
        if gradient is not None and _state_of(gradient) != self._before:
            self._gradient = weakref.ref(gradient)

    def holds(self, first: torch.Tensor) -> bool:
        """Whether the gradients of the backward are still there."""
        if self._gradient is None:  # of ``torch.autograd.grad``: the program assigns them itself
            return version_of(first) == self._version
        return first.grad is not None and first.grad is self._gradient()


def _state_of(gradient: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (id(gradient), version_of(gradient))


def note_crossing(node: Any) -> None:
    """Note that gradients have crossed ranks in `node` of a graph, whose backward runs."""
    first = next(
        (leaf for leaf in leaves_behind(node) if isinstance(leaf, torch.nn.Parameter)), None
    )
    if first is not None:
        note = _notes[first] = _Note(node, first)
        call_at_end_of_task(note.note_gradient)


def have_crossed(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the present gradients of some of `parameters` have crossed ranks."""
    asked = set(map(id, parameters))
    for first, note in list(_notes.items()):
        if not note.holds(first):
            continue
        node = note.node()
        behind = (first,) if node is None else leaves_behind(node)
        if any(id(leaf) in asked for leaf in behind):
            return True
    return False


def leaves_behind(node: Any) -> Iterator[torch.Tensor]:
    """The leaf tensors that a backward from `node` reaches."""
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
