# SPDX-License-Identifier: Apache-2.0
"""`BackwardListener`: hooks on parameters that notice every backward, whatever code started it.

A hook on each parameter runs when a gradient comes. The first one that runs in a graph task (one
run of autograd's engine) decides the kind of the task: a backward that adds to ``parameter.grad``,
which has to be reduced, or ``torch.autograd.grad``, which only returns gradients. Reentrant
checkpointing starts tasks inside of tasks, and autograd has a thread for each device.

Rejected: hooks on ``forward`` (custom methods and ``model.module`` go around them), and patching
``Tensor.backward`` (``torch.autograd.backward`` goes around it).
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from lockstep._torch_compat import current_graph_task
from lockstep.paused_gc import pause_gc
from lockstep.sync.parameter_hooks import ParameterHooks, is_accumulating, run_inside_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lockstep.sync.buckets import Slot
    from lockstep.sync.transport_protocol import Transport


class BackwardListener:
    """The hooks on all synchronised parameters.

    Args:
        slots: the parameters.
        transport: its `on_accumulated` is called for each gradient that was accumulated.
        on_backward: called when a task that adds to ``parameter.grad`` brings its first gradient.
        on_autograd_grad: called when ``torch.autograd.grad`` computes gradients of parameters.

    Attributes:
        is_listening: the hooks are on the parameters.
        is_running: a backward whose gradients have to be reduced runs; new tasks belong to it.
        hooked: the numbers of parameters on which the user has registered hooks.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        transport: Transport,
        on_backward: Callable[[Slot], None],
        on_autograd_grad: Callable[[], None],
    ) -> None:
        self._on_backward = on_backward
        self._on_autograd_grad = on_autograd_grad
        self._transport = transport
        self._lock = threading.RLock()  # the garbage collector may end a failed backward inside
        self._is_accumulating: dict[int, bool] = {}  # by graph task: does it add to parameter.grad?
        self.hooked: set[int] = set()
        self.is_listening = True
        self.is_running = False
        with pause_gc():
            self._hooks = {slot: self._hook(slot) for slot in slots}

    def _hook(self, slot: Slot) -> ParameterHooks:
        is_accumulating_in, hooked, number = self._is_accumulating, self.hooked, slot.number
        # The garbage collector does not look into torch's own reference to the table of hooks that
        # wait for the accumulation: nothing that leads from there to the parameter may be strong.
        weak_transport, weak_slot = weakref.ref(self._transport), weakref.ref(slot)

        def before_accumulation(gradient: torch.Tensor) -> torch.Tensor | None:
            accumulates_here = is_accumulating_in.get(current_graph_task())
            if accumulates_here is None:
                accumulates_here = self._enter_task(slot)
            # Apply the user's hooks at once to a gradient that ``torch.autograd.grad`` returns.
            return None if accumulates_here else self._hooks[slot].apply_tensor_hooks(gradient)

        def after_accumulation(param: torch.Tensor) -> None:
            if not param.requires_grad:
                return  # frozen since the forward: torch calls this, and has accumulated nothing
            transport, arrived = weak_transport(), weak_slot()
            if transport is not None and arrived is not None and transport.on_accumulated:
                transport.on_accumulated(arrived)

        after = after_accumulation if self._transport.needs_on_accumulated else None
        return ParameterHooks(slot.param, before_accumulation, after, lambda: hooked.add(number))

    def _enter_task(self, slot: Slot) -> bool:
        """At the first gradient of a graph task: whether the task adds to ``parameter.grad``."""
        with self._lock:
            task = current_graph_task()
            if task in self._is_accumulating:
                return self._is_accumulating[task]
            # A task around a reentrant checkpoint begins first, and may bring its gradients last.
            if not self.is_running:
                self.forget_tasks()
            if not is_accumulating(slot.param):
                self._is_accumulating[task] = False
                self._on_autograd_grad()
                return False
            self.find_user_hooks()
            self._on_backward(slot)
            # Set last: until then the hooks of other devices' threads have to wait here.
            self._is_accumulating[task] = True
            return True

    def forget_tasks(self) -> None:
        """Forget the graph tasks so far, which have ended."""
        self._is_accumulating.clear()

    def find_user_hooks(self) -> None:
        """Find hooks that the user has registered since the last backward."""
        for hooks in self._hooks.values():
            hooks.adopt_post_accumulate_hooks()

    def pass_user_hooks(
        self,
        reduced: dict[Slot, torch.Tensor],
        write_gradient: Callable[[Slot, torch.Tensor], None],
    ) -> None:
        """Let reduced gradients pass the user's hooks, in the order in which autograd would.

        Args:
            reduced: emptied; after an exception the gradients that have not landed remain.
            write_gradient: puts a gradient that has passed the hooks on its tensor into
                ``parameter.grad``; the hooks that wait for that run afterwards.
        """

        def run() -> None:
            for slot in list(reduced):
                changed = self._hooks[slot].apply_tensor_hooks(reduced[slot])
                gradient = reduced.pop(slot)
                if changed is not gradient:
                    gradient.copy_(changed)  # keep the tensor object that the round has left
                write_gradient(slot, gradient)
                self._hooks[slot].run_post_accumulate_hooks()

        run_inside_backward([slot.param for slot in reduced], run)

    def release(self) -> None:
        """Give the parameters' hooks back to autograd."""
        self.is_listening = False
        hooks, self._hooks = self._hooks, {}
        for each in hooks.values():
            each.release()
