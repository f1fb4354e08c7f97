# SPDX-License-Identifier: Apache-2.0
"""The reduction that is active now: who the peers are, and what this rank's batch counts for.

`sync` and the trainer fill it, `collectives` read it. It sits at the very bottom so that
neither has to know the other.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Peers(Protocol):
    """What is known of a `lockstep.group.Group` down here."""

    rank: int
    size: int


@dataclass
class Reduction:
    """What the loss being computed will take part in.

    Attributes:
        group: the ranks whose gradients become one.
        weight: what the delivered batch counts for (samples, tokens); None: one per rank.
        per_shard: the loss is computed shard by shard, so that a function which needs the
            whole global batch (a gather, a contrastive loss) must refuse.
    """

    group: Peers
    weight: float | None = None
    per_shard: bool = False


class _OfThisThread(threading.local):
    current: Reduction | None = None


_of_this_thread = _OfThisThread()
# Autograd runs CUDA backwards, and the Python hooks in them, on threads of its own. Those see
# the reduction of the process: with one rank per process there is only one. Ranks that are
# threads of one process (CPU) run their hooks on their own thread and never come here.
_of_the_process: list[Reduction] = []


def active() -> Reduction | None:
    """The active reduction of this thread, else the one last activated in this process."""
    current = _of_this_thread.current
    if current is not None:
        return current
    return _of_the_process[-1] if _of_the_process else None


@contextmanager
def activate(reduction: Reduction) -> Iterator[Reduction]:
    """Make `reduction` the active one inside the block. Blocks nest."""
    before = _of_this_thread.current
    _of_this_thread.current = reduction
    _of_the_process.append(reduction)
    try:
        yield reduction
    finally:
        _of_this_thread.current = before
        # By identity: with threads as ranks the blocks of different threads interleave, and
        # two equal reductions are still two.
        for position in range(len(_of_the_process) - 1, -1, -1):
            if _of_the_process[position] is reduction:
                del _of_the_process[position]
                break
