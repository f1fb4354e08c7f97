# SPDX-License-Identifier: Apache-2.0
"""What the ways to synchronise have in common whose gradients come in windows.

Which peers there are, what a batch weighs and when a window is open does not depend on who
carries the gradients: our own buckets, or torch's DDP. What a backward sets in motion does.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lockstep import _torch_compat, reduction_context
from lockstep.errors import WeightError
from lockstep.sync import round_checks
from lockstep.sync.buckets import Slot, set_aside
from lockstep.sync.buffer_broadcast import BufferBroadcast
from lockstep.sync.captured_gradients import CapturedGradients
from lockstep.sync.gradient_hooks import ParameterHooks, accumulates, inside_a_backward
from lockstep.sync.graph_task import call_at_end
from lockstep.sync.late_parameters import LateParameters
from lockstep.sync.reducer import PLAIN, WEIGHTED
from lockstep.sync.replica_checks import compare_values
from lockstep.sync.window_weights import (
    WindowWeights,
    checked_weight,
    gradient_as_left,
    is_as_left,
    weighted_root,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from lockstep.group import Group
    from lockstep.sync.synced_tensors import SyncedTensors
    from lockstep.sync.window_weights import Units


class WindowedSync:
    """One rank's side of it; what is left of `Synchroniser` is the subclass's.

    Args:
        modules: the roots of what is synchronised.
        group: the peers; until `detach`.
        found: what is synchronised, after the ranks have agreed on it.
        units: of its weights.
        averages: False if the losses are sums over their batches.

    Attributes:
        place: this rank among its peers, for errors.
        rounds: how many reductions there have been.
        full_round: the last one that left every parameter a gradient.
        has_added: see `watch_gradients`.
        has_accumulated: the program left `no_sync` since the last optimizer step.
    """

    full_round = 0

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        group: Group,
        found: SyncedTensors,
        units: Units,
        *,
        averages: bool,
    ) -> None:
        self.place = f"rank {group.rank} of {group.size}"
        self.rounds = 0
        self._group: Group | None = group
        self._buffers = BufferBroadcast(found.buffers.values())
        self._slots = [
            Slot(number, name, param, self)
            for number, (name, param) in enumerate(found.parameters.items())
        ]
        self._units = units
        self.averages = averages
        self._window = WindowWeights()
        self._delivered: float | WeightError | None = None
        self._is_paused = self._is_broken = self.has_accumulated = False
        self._is_open = self._is_running = self._has_failed = False
        self._step = 0  # of the run, or of the optimizers, to which rounds belong
        self._steps_taken = 0
        self._lock = threading.RLock()  # the garbage collector may end a failed backward inside
        self._tasks: dict[int, bool] = {}  # runs of the engine; does each add to parameter.grad?
        self._arrive: Callable[[Slot], None] | None = None
        self._hooks: dict[Slot, ParameterHooks] = {}
        self._hooked: set[int] = set()  # numbers of slots that have had hooks of the user's
        self._captures = CapturedGradients(self._slots)
        self._late = LateParameters(modules, found.parameters.values())
        self._watched_from = 0
        self.has_added = False
        self._accumulated: list[Slot] = []  # whose gradient is a sum with those of earlier rounds

    def expect_weight(self, total: float | None) -> None:
        """What all ranks' batches of a usual step weigh; a step that does needs no division.

        The same on every rank; the result does not depend on it.
        """
        self._units.expect(total)

    def set_delivered_weight(self, weight: float | WeightError | None) -> None:
        """Say what the batch counts for whose plain ``loss.backward()`` comes next.

        Args:
            weight: samples or tokens; None: one per rank (torch's mean over ranks); an error:
                to raise from the next backward without an explicit weight, on this rank alone,
                before it communicates.

        Gradient:
            Applied in the buckets, at the reduction.

        Collective:
            None.

        Raises:
            WeightError: negative, NaN or infinite.
        """
        is_number = weight is not None and not isinstance(weight, WeightError)
        self._delivered = checked_weight(weight, self.place) if is_number else weight
        reduction_context.deliver(
            None if isinstance(self._delivered, WeightError) else self._delivered
        )

    def delivered_weight(self) -> float | None:
        """What `set_delivered_weight` was given last; raised, if it was an error."""
        if isinstance(self._delivered, WeightError):
            raise self._delivered
        return self._delivered

    def begin_step(self, step: int) -> None:
        """Say which optimizer step the backwards from now on belong to; the same on every rank.

        Gradient:
            A round of ranks at different steps, or whose optimizers have stepped more or less
            often, is refused on all of them: it would average what does not belong together.

        Collective:
            None.
        """
        self._step = 16 * step + self._steps_taken  # a step that was left out shows in the next

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate on this rank; the next backward outside closes the window.

        Gradient:
            Weighted backwards of the window are divided once by all their weights; plain ones
            add up, as in torch.

        Collective:
            None inside the block.
        """
        before = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before
            self.has_accumulated = True

    def agree_on_values(self) -> None:
        """Refuse to go on if the parameters differ between ranks.

        Gradient:
            None: metadata only.

        Collective:
            Every rank. Two small all-gathers.

        Raises:
            ReplicasDifferError: on every rank; names the parameters and the ranks.
        """
        params = {slot.name: slot.param for slot in self._slots}
        compare_values(self.attached(), params, have_stepped=self._steps_taken > 0)

    def watch_gradients(self) -> None:
        """See `Synchroniser`."""
        self._watched_from, self.has_added = self.rounds, False

    def may_go_back_to(self, step: int | None) -> None:
        """See `Synchroniser`; here each rank keeps what it needs for that itself."""

    def has_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `Synchroniser`; here optimizers step where they are."""
        return False

    def _hook_parameters(self, *, arrivals: bool = True) -> None:
        """Take the parameters' hooks; `arrivals`: `_arrive` has to hear of each gradient."""
        self._hooks = {slot: self._hook(slot, arrivals=arrivals) for slot in self._slots}

    def _unhook_parameters(self) -> None:
        hooks, self._hooks = self._hooks, {}
        for each in hooks.values():
            each.release()

    def _hook(self, slot: Slot, *, arrivals: bool) -> ParameterHooks:
        tasks, hooked = self._tasks, self._hooked

        def gradient_comes(gradient: torch.Tensor) -> torch.Tensor | None:
            adds_up = tasks.get(_torch_compat.current_graph_task())
            if adds_up is None:
                adds_up = self._enter_task(slot)
            # What ``torch.autograd.grad`` returns passes the user's hooks here and now.
            return None if adds_up else self._hooks[slot].applied_to(gradient)

        def gradient_arrived(_: torch.Tensor) -> None:
            if self._arrive is not None:
                self._arrive(slot)

        arrived = gradient_arrived if arrivals else None
        return ParameterHooks(slot.param, gradient_comes, arrived, lambda: hooked.add(slot.number))

    def _enter_task(self, slot: Slot) -> bool:
        """A run of the engine brings its first gradient: does it add to ``parameter.grad``?"""
        with self._lock:
            task = _torch_compat.current_graph_task()
            if task in self._tasks:
                return self._tasks[task]
            # A task that began first may come last: what encloses a reentrant checkpoint.
            is_inner = self._is_running
            if not is_inner:
                self._tasks.clear()  # runs that have ended
            if not accumulates(slot.param):
                self._tasks[task] = False
                if self.needs_guard and not self._is_paused:
                    self._captures.note(self.place, self.rounds, self._steps_taken)
                return False
            self._look_for_hooks()
            if not is_inner:
                self._refuse_weight_of_another(slot)
                self._open_window(PLAIN)
            if torch.is_grad_enabled():
                self._window.faults.append({"kind": "graph", "names": [slot.name]})
            if not is_inner:
                self._is_running = True
                if self._is_paused:
                    self._at_end(self._leave_window_open)
                else:
                    self._begin_plain()
            # Last: until then the hooks of other devices' threads have to wait here.
            self._tasks[task] = True
            return True

    def _refuse_weight_of_another(self, slot: Slot) -> None:
        driving, group = reduction_context.active(), self._group
        # Other ranks may be threads of this process.
        if driving and driving.at_root and group and driving.group.rank == group.rank:
            raise round_checks.refused("driven", [slot.name], self.place)

    def _look_for_hooks(self) -> None:
        for hooks in self._hooks.values():
            hooks.look_after()

    def _at_end(self, function: Callable[[], None]) -> None:
        """Call `function` when the running backward has ended and its gradients are in place."""
        call_at_end(function, self._fail)

    def _backward(
        self, loss: torch.Tensor, weight: float | None, backward_kwargs: dict[str, Any]
    ) -> None:
        """See `Synchroniser.backward`."""
        scale: float | None = None
        if weight is None:
            self._open_window(PLAIN)
        else:
            weight = checked_weight(weight, self.place)
            share = weight / self._unit(WEIGHTED) if self.averages else float(weight > 0)
            given = backward_kwargs.get("gradient")
            scale, loss, given = weighted_root(loss, given, share, self.place)
            backward_kwargs["gradient"] = given
            self._open_window(WEIGHTED)
            self._window.weight += scale
        self._drive(lambda: loss.backward(**backward_kwargs), scale)

    def _unit(self, kind: str) -> float:
        return self._units[kind]

    def _open_window(self, kind: str) -> None:
        """A backward begins, maybe the first of its window: `kind` and weight are noted."""
        self.attached()
        if self._has_failed:
            self._reset()
            self.attached()
        self._check_left_gradients()
        is_first = self._window.kind is None
        if kind == WEIGHTED:
            self._window.enter(WEIGHTED, self.place)
        elif self.averages:
            self._window.enter_plain(self.delivered_weight(), self.place)
        else:
            self._window.enter_sum(self.delivered_weight(), self.place)
        if is_first:
            self._keep_earlier()

    def _drive(self, run: Callable[[], None], weight: float | None) -> None:
        """Run a backward whose root carries `weight`; the round begins before and ends after."""
        raise NotImplementedError

    def _begin_plain(self) -> None:
        """A plain backward outside `no_sync` has begun."""
        raise NotImplementedError

    def _leave_window_open(self) -> None:
        """A backward under `no_sync` has ended: note what it left."""
        self._is_running = False
        self._window.left = [gradient_as_left(slot.param.grad) for slot in self._slots]

    def _check_left_gradients(self) -> None:
        """The next backward of a window comes: what did the program do to its gradients?

        Zeroed gradients are a window that was given up, with its weights. Others cannot be told
        from the sum of the window's backwards, and no rank knows what they count for.
        """
        left = self._window.left
        if left is None or all(map(is_as_left, left, (s.param.grad for s in self._slots))):
            return
        grads = [slot.param.grad for slot in self._slots if slot.param.grad is not None]
        # What the window has not reached is out of sight: was it to be zeroed, too?
        is_hidden = any(left[slot.number] is None for slot in self._window.aside)
        if is_hidden or any(bool(grad.any()) for grad in grads):
            self._window.faults.append({"kind": "touched", "names": []})
        else:
            for slot in self._slots:
                slot.param.grad = None
            self._reset()

    def _reset(self) -> None:
        raise NotImplementedError

    def _keep_earlier(self) -> None:
        """What earlier rounds left is not reduced again, and passes no hook again."""
        self._look_for_hooks()
        window = self._window
        window.aside, window.earlier, window.is_edited, held = set_aside(self._slots)
        since = self._watched_from
        if any(max(slot.passed, self.full_round) <= since for slot in held):
            self.has_added = True

    def _fail(self) -> None:
        """A backward raised midway. What it left is this rank's own, and part of a whole."""
        window = self._window
        for slot in self._slots:
            part, earlier = slot.param.grad, window.aside.get(slot)
            if part is None:
                slot.param.grad = earlier
                if not window.is_edited:
                    slot.deliver(earlier)
            elif earlier is not None:
                with torch.no_grad():
                    slot.param.grad = earlier.add_(part)
        self._reset()
        self._has_failed = True

    def _put_back_earlier(self, window: WindowWeights) -> None:
        """A round was refused: nothing of it is left."""
        for slot in self._slots:
            earlier = window.aside.get(slot)
            slot.param.grad = earlier
            if not window.is_edited:
                slot.deliver(earlier)

    def _complete(
        self, window: WindowWeights, *, is_round: bool, unreduced: Container[Slot] = ()
    ) -> None:
        """What a round has reduced passes the user's hooks, and is added to what was there.

        Args:
            window: of the round.
            is_round: the ranks have compared what was done to earlier gradients.
            unreduced: parameters whose gradient is still this rank's own.
        """
        self._accumulated = list(window.aside)
        vouched = is_round or not window.is_edited
        brought: dict[Slot, torch.Tensor] = {}
        for slot in reversed(self._slots if self._hooked else ()):
            grad = slot.param.grad
            waits = slot.number in self._hooked and slot.param.requires_grad
            if waits and grad is not None and slot not in unreduced:
                brought[slot] = grad
        with torch.no_grad():
            for slot, earlier in window.aside.items():
                if slot not in brought:
                    grad = slot.param.grad
                    slot.param.grad = earlier if grad is None else earlier.add_(grad)
                    if grad is not None and slot in unreduced:
                        slot.disown()
                    else:
                        self._vouch(slot, vouched, is_new=is_round)
            for slot in window.aside if vouched else ():
                if slot.holds_delivered:
                    slot.accept_changes()  # views of one tensor have one version together
        self._captures.remember_gradients()
        if brought:
            self._bring(brought, window, vouched)

    def _vouch(self, slot: Slot, vouched: bool, *, is_new: bool) -> None:
        """``parameter.grad``, earlier gradients included, is the same on every rank."""
        if vouched:
            slot.deliver(slot.param.grad)
        if is_new:
            slot.passed = self.rounds

    def _bring(
        self, brought: dict[Slot, torch.Tensor], window: WindowWeights, vouched: bool
    ) -> None:
        """Let reduced gradients pass the user's hooks on their way into ``parameter.grad``."""
        for slot in brought:
            slot.param.grad = window.aside.get(slot)

        def run() -> None:
            for slot in list(brought):
                changed = self._hooks[slot].applied_to(brought[slot])
                reduced = brought.pop(slot)
                if changed is not reduced:
                    reduced.copy_(changed)  # the tensor stays the one that the round has left
                earlier = slot.param.grad
                slot.param.grad = reduced if earlier is None else earlier.add_(reduced)
                if slot in window.aside:
                    self._vouch(slot, vouched, is_new=True)
                self._captures.remember(slot)
                self._hooks[slot].run_after()

        try:
            inside_a_backward([slot.param for slot in brought], run)
        except BaseException:
            # As if a hook had raised inside the user's backward.
            for slot, reduced in brought.items():
                earlier = slot.param.grad
                slot.param.grad = reduced if earlier is None else earlier.add_(reduced)
            self._fail()
            raise

    # ------------------------------------------------------------------ for the guard

    def note_step(self) -> None:
        """An optimizer is about to step, with gradients that it may use."""
        if self._group is not None:
            self._group.confirm()
        self._step += 1
        self._steps_taken += 1
        self.has_accumulated = False
        self._accept_changes()

    def _accept_changes(self) -> None:
        for slot in self._slots:
            slot.accept_changes()

    @property
    def slots(self) -> Sequence[Slot]:
        """All parameters."""
        return self._slots

    def suspects_changes(self, slots: Sequence[Slot]) -> bool:
        """Gradients of this rank alone may have got into gradients or weights of `slots`."""
        return self._captures.suspects(slots)

    @property
    def is_borrowed(self) -> bool:
        """The batch in hand belongs to another rank: this one has no samples."""
        return self._delivered == 0.0

    @property
    def needs_guard(self) -> bool:
        """A rank alone has whole gradients, however it got them."""
        return self._group is not None and self._group.size > 1

    @property
    def holds_nothing(self) -> bool:
        """Every gradient was zeroed, and the open window hides none of earlier rounds."""
        return not self._window.aside and all(slot.param.grad is None for slot in self._slots)

    @property
    def has_open_window(self) -> bool:
        """Gradients have arrived since the last round, or a backward failed midway.

        What a failed backward leaves with a rank alone is what it leaves in one process.
        """
        return self._window.kind is not None or (self._has_failed and self.needs_guard)

    def holds(self, param: torch.Tensor) -> bool:
        """`param` is in the modules that are synchronised, maybe since later."""
        return self._late.include(param)

    def attached(self) -> Group:
        """The group, while gradients can be reduced over it.

        Raises:
            NotAvailableError: after `detach`.
            GradientNotReducedError: an earlier failure left the ranks at different places.
        """
        if self._group is None:
            raise round_checks.detached(self.place)
        if self._is_broken:
            raise round_checks.broken(self.place)
        return self._group
