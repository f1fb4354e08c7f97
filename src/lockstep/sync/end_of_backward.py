# SPDX-License-Identifier: Apache-2.0
"""Calls a function at the end of the outermost graph task in which a hook runs.

A graph task is one run of autograd's engine. Reentrant checkpointing starts a second one from
inside a node of the first; callbacks belong to the task in which they are queued, and there is no
way to queue one for the enclosing task while the inner one runs. But the engine destroys an inner
task, with its callbacks, before it returns to the node of the outer one. So a callback that is
queued in an inner task does nothing when called; its ``__del__`` queues it again, by then in the
enclosing task.

If a later torch destroyed tasks at another moment, no reduction would run, and the optimizer guard
would refuse the step: a clear failure.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lockstep._torch_compat import PYTHON_NODE, call_at_end_of_task, current_graph_task

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


def nesting_depth() -> int:
    """The number of graph tasks around the current one (walks the stack: some microseconds)."""
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is PYTHON_NODE
        frame = frame.f_back
    return depth


def call_at_end(
    function: Callable[[], None],
    or_else: Callable[[], None] | None = None,
    *,
    is_last: bool = False,
) -> None:
    """Call `function` when the outermost backward that is running on this thread has ended.

    Its exceptions reach the caller of that backward, with their own type.

    Args:
        function: called if the backward has not failed.
        or_else: called if it has, before its exception reaches the caller.
        is_last: after the callbacks that others queue for the end while this backward runs.
    """
    if is_last:
        call_at_end(lambda: call_at_end(function, or_else), or_else)
        return
    last = _AtEnd(function, or_else)
    call_at_end_of_task(_RequeueInOuterTask(last) if nesting_depth() else last)


class _AtEnd:
    """A callback of a graph task; autograd destroys it uncalled if the task fails."""

    def __init__(self, function: Callable[[], None], or_else: Callable[[], None] | None) -> None:
        self._function = function
        self._or_else = or_else

    def __call__(self) -> None:
        self._or_else = None
        self._function()

    def __del__(self) -> None:
        if self._or_else is not None:
            self._or_else()


class _RequeueInOuterTask:
    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self) -> None:
        """Do nothing: the inner task has ended, but not the task around it."""

    def __del__(self) -> None:
        if current_graph_task() < 0:
            return  # no task runs: the backward failed and is being taken down
        # One node is still on the stack: the one whose task is now the current one.
        call_at_end_of_task(
            self._function if nesting_depth() <= 1 else _RequeueInOuterTask(self._function)
        )
