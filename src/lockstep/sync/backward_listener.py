# SPDX-License-Identifier: Apache-2.0
"""Hears of every backward that reaches a synchronised parameter, whatever code started it.

A hook on each parameter runs when a gradient comes. The first one that runs in a graph task (one
run of autograd's engine) decides the kind of the task: a backward that adds to ``parameter.grad``,
which has to be reduced, or ``torch.autograd.grad``, which only returns gradients. Reentrant
checkpointing starts tasks inside of tasks, and autograd has a thread for each device.

Rejected: hooks on ``forward`` (custom methods and ``model.module`` go around them), and patching
``Tensor.backward`` (``torch.autograd.backward`` goes around it).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from lockstep._torch_compat import current_graph_task
from lockstep.sync.gradient_hooks import ParameterHooks, accumulates, inside_a_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lockstep.sync.buckets import Slot
    from lockstep.sync.transport import Transport


class BackwardListener:
    """The hooks on all synchronised parameters.

    Args:
        slots: the parameters.
        transport: its `listener` hears of each gradient that was accumulated.
        began: called when a task that adds to ``parameter.grad`` brings its first gradient.
        asked_for: called when ``torch.autograd.grad`` computes gradients of parameters.

    Attributes:
        is_listening: the hooks are on the parameters.
        is_running: a backward that has to be reduced runs; tasks that begin now belong to it.
        hooked: the numbers of parameters that have had hooks of the user's.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        transport: Transport,
        began: Callable[[Slot], None],
        asked_for: Callable[[], None],
    ) -> None:
        self._began = began
        self._asked_for = asked_for
        self._transport = transport
        self._lock = threading.RLock()  # the garbage collector may end a failed backward inside
        self._adds_up: dict[int, bool] = {}  # by graph task: does it add to parameter.grad?
        self.hooked: set[int] = set()
        self.is_listening = True
        self.is_running = False
        self._hooks = {slot: self._hook(slot) for slot in slots}

    def _hook(self, slot: Slot) -> ParameterHooks:
        adds_up_in, hooked, transport = self._adds_up, self.hooked, self._transport

        def gradient_comes(gradient: torch.Tensor) -> torch.Tensor | None:
            adds_up = adds_up_in.get(current_graph_task())
            if adds_up is None:
                adds_up = self._enter_task(slot)
            # What ``torch.autograd.grad`` returns passes the user's hooks here and now.
            return None if adds_up else self._hooks[slot].applied_to(gradient)

        def gradient_arrived(_: torch.Tensor) -> None:
            if transport.listener is not None:
                transport.listener(slot)

        arrived = gradient_arrived if transport.hears_arrivals else None
        return ParameterHooks(slot.param, gradient_comes, arrived, lambda: hooked.add(slot.number))

    def _enter_task(self, slot: Slot) -> bool:
        """A graph task brings its first gradient: does it add to ``parameter.grad``?"""
        with self._lock:
            task = current_graph_task()
            if task in self._adds_up:
                return self._adds_up[task]
            # A task that began first may come last: what encloses a reentrant checkpoint.
            if not self.is_running:
                self.forget_tasks()
            if not accumulates(slot.param):
                self._adds_up[task] = False
                self._asked_for()
                return False
            self.look_for_hooks()
            self._began(slot)
            # Last: until then the hooks of other devices' threads have to wait here.
            self._adds_up[task] = True
            return True

    def forget_tasks(self) -> None:
        """The graph tasks so far have ended."""
        self._adds_up.clear()

    def look_for_hooks(self) -> None:
        """Find hooks that the user has registered since the last backward."""
        for hooks in self._hooks.values():
            hooks.look_after()

    def pass_user_hooks(
        self, reduced: dict[Slot, torch.Tensor], land: Callable[[Slot, torch.Tensor], None]
    ) -> None:
        """Let reduced gradients pass the user's hooks, in the order in which autograd would.

        Args:
            reduced: emptied; after an exception the gradients that have not landed remain.
            land: puts a gradient that has passed the hooks on its tensor into
                ``parameter.grad``; the hooks that wait for that run afterwards.
        """

        def run() -> None:
            for slot in list(reduced):
                changed = self._hooks[slot].applied_to(reduced[slot])
                gradient = reduced.pop(slot)
                if changed is not gradient:
                    gradient.copy_(changed)  # the tensor stays the one that the round has left
                land(slot, gradient)
                self._hooks[slot].run_after()

        inside_a_backward([slot.param for slot in reduced], run)

    def release(self) -> None:
        """Give the parameters' hooks back to autograd."""
        self.is_listening = False
        hooks, self._hooks = self._hooks, {}
        for each in hooks.values():
            each.release()
