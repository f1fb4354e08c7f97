# SPDX-License-Identifier: Apache-2.0
"""The reduction context: the group and the batch weight of the loss that a thread computes now.

`sync` and the operator's loops fill it, `collectives` read it. The module sits below both, so that
neither has to know the other: a gather inside a loss needs the weight that the gradients of the
loss will be multiplied by, and learns of it here.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    import torch

    from lockstep.errors import WeightError
    from lockstep.group import Group


@dataclass
class ReductionContext:
    """The group, weight and reduction of the loss that a thread computes.

    Attributes:
        group: the ranks whose gradients become one.
        weight: of the delivered batch (samples, tokens); None: one per rank.
        per_shard: the loss is computed shard by shard, so that a function which needs the
            whole global batch (a gather, a contrastive loss) must refuse.
        purpose: "train", "validation" or "predict": what the batch is computed for.
        is_borrowed: this rank has no samples in the batch that it computes on, and brings no rows;
            the error to raise where this cannot be known.
        averages: the losses of the ranks are averaged by weight; False: added.
        at_root: the loss of the backward that runs was multiplied by `weight`. False: the weight
            is applied where the gradients are reduced.
        earlier: gradients that earlier rounds left, by the ids of their parameters: they are not in
            ``parameter.grad`` during the backward, and are added to its reduced gradients.
    """

    group: Group
    weight: float | None = None
    per_shard: bool = False
    purpose: str = "train"
    is_borrowed: bool | WeightError = False
    averages: bool = True
    at_root: bool = False
    earlier: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class DeliveredWeight:
    """Outside a trainer: the batch weight of a thread's next plain backward, as it is now."""

    weight: float | None = None


class _OfThisThread(threading.local):
    current: ReductionContext | None = None

    def __init__(self) -> None:
        self.delivered = DeliveredWeight()


_of_this_thread = _OfThisThread()
# Autograd runs CUDA backwards, and the Python hooks in them, on threads of its own. Those see
# the reduction of the process: with one rank per process there is only one. Ranks that are
# threads of one process (CPU) run their hooks on their own thread and never come here.
_of_the_process: list[ReductionContext] = []
_lock = threading.Lock()  # ranks that are threads enter and leave at the same time


def active() -> ReductionContext | None:
    """The context of this thread, else the one that was activated last in this process."""
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


def activate_for_backward(
    group: Group, weight: float | None, earlier: Mapping[int, torch.Tensor]
) -> AbstractContextManager[ReductionContext]:
    """Around a backward that a `GradientSync` over `group` runs.

    Args:
        weight: that the root of the backward carries; None for a plain backward.
        earlier: see `ReductionContext`.
    """
    # Not `active()`: its context for the whole process may be that of another rank.
    around = _of_this_thread.current or ReductionContext(group, _of_this_thread.delivered.weight)
    if earlier:
        around = replace(around, earlier=earlier)
    if weight is not None:
        around = replace(around, weight=weight, at_root=True)
    return activate(around)


def set_batch_weight(weight: float | None) -> None:
    """Outside a trainer: set the batch weight of this thread's next plain backward."""
    _of_this_thread.delivered.weight = weight


def weight_holder() -> ReductionContext | DeliveredWeight:
    """The object whose `weight` is that of the present batch: None if no program has set one.

    A backward, which may run on another thread, reads the weight there: the reduction applies the
    one that is set by then.
    """
    return active() or _of_this_thread.delivered
