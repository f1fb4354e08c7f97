# SPDX-License-Identifier: Apache-2.0
"""The reduction that is active now: who the peers are, and what this rank's batch counts for.

`sync` and the trainer fill it, `collectives` read it. It sits at the very bottom so that
neither has to know the other.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    import torch

    from lockstep.group import Group


@dataclass
class ReductionContext:
    """What the loss being computed will take part in.

    Attributes:
        group: the ranks whose gradients become one.
        weight: what the delivered batch counts for (samples, tokens); None: one per rank.
        per_shard: the loss is computed shard by shard, so that a function which needs the
            whole global batch (a gather, a contrastive loss) must refuse.
        averages: the losses of the ranks are averaged by weight; False: added.
        at_root: the weight was put on the root of the backward that runs. False: it will be
            applied where the gradients are reduced.
        earlier: gradients that earlier steps left, by the ids of their parameters: out of sight
            during the backward, whose own are added to them when they are reduced.
    """

    group: Group
    weight: float | None = None
    per_shard: bool = False
    averages: bool = True
    at_root: bool = False
    earlier: Mapping[int, torch.Tensor] = field(default_factory=dict)


class _OfThisThread(threading.local):
    current: ReductionContext | None = None
    delivered: float | None = None


_of_this_thread = _OfThisThread()
# Autograd runs CUDA backwards, and the Python hooks in them, on threads of its own. Those see
# the reduction of the process: with one rank per process there is only one. Ranks that are
# threads of one process (CPU) run their hooks on their own thread and never come here.
_of_the_process: list[ReductionContext] = []
_lock = threading.Lock()  # ranks that are threads enter and leave at the same time


def active() -> ReductionContext | None:
    """The active reduction of this thread, else the one last activated in this process."""
    current = _of_this_thread.current
    if current is not None:
        return current
    with _lock:
        return _of_the_process[-1] if _of_the_process else None


def activate(reduction: ReductionContext) -> AbstractContextManager[ReductionContext]:
    """Make `reduction` the active one inside the block. Blocks nest."""
    return _Active(reduction)


class _Active:
    """A class and not a generator: it is entered twice in every step."""

    __slots__ = ("_before", "_reduction")

    def __init__(self, reduction: ReductionContext) -> None:
        self._reduction = reduction

    def __enter__(self) -> ReductionContext:
        self._before = _of_this_thread.current
        _of_this_thread.current = self._reduction
        with _lock:
            _of_the_process.append(self._reduction)
        return self._reduction

    def __exit__(self, *_: object) -> None:
        _of_this_thread.current = self._before
        # By identity: with threads as ranks the blocks of different threads interleave, and
        # two equal reductions are still two.
        with _lock:
            for position in range(len(_of_the_process) - 1, -1, -1):
                if _of_the_process[position] is self._reduction:
                    del _of_the_process[position]
                    break


def backward_of(
    group: Group, weight: float | None, earlier: Mapping[int, torch.Tensor]
) -> AbstractContextManager[ReductionContext]:
    """Around a backward that a `GradientSync` over `group` runs.

    Args:
        weight: what was put on its root; None for a plain one.
        earlier: see `ReductionContext`.
    """
    # Of this thread: the user's, and on it no other rank runs.
    around = _of_this_thread.current or ReductionContext(group, _of_this_thread.delivered)
    if earlier:
        around = replace(around, earlier=earlier)
    if weight is not None:
        around = replace(around, weight=weight, at_root=True)
    return activate(around)


def deliver(weight: float | None) -> None:
    """Outside a trainer: what the batch of this thread's next plain backward counts for."""
    _of_this_thread.delivered = weight


def delivered_weight() -> float | None:
    """What the batch in hand counts for, as far as anybody said; None: one per rank."""
    current = active()
    return _of_this_thread.delivered if current is None else current.weight


class Crossing:
    """A backward to come in which gradients travel between the ranks of `group`.

    While one is ahead, no bucket may leave: where ranks run their backwards differently (a
    rank without samples reduces nothing before its backward has ended), the bucket of one
    would meet the crossing of another. Kept by the graph, and gone with it.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        with _crossings_lock:
            _crossings.add(self)

    def is_over(self) -> None:
        """Its backward has communicated."""
        with _crossings_lock:
            _crossings.discard(self)


_crossings: weakref.WeakSet[Crossing] = weakref.WeakSet()
_crossings_lock = threading.Lock()


def crossing_ahead(group: Group) -> bool:
    """Whether a graph is alive whose backward will communicate on `group`."""
    if not _crossings:
        return False
    with _crossings_lock:
        return any(one.group.is_same_as(group) for one in _crossings)
