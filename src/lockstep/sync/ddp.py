# SPDX-License-Identifier: Apache-2.0
"""N gradients become one through torch's DistributedDataParallel.

The objective is the one of `GradientSync`: a backward's weight multiplies its root, and a bucket
is divided once by the sum of all weights. A plain ``loss.backward()`` carries the delivered
weight in its buckets. What DDP adds is its rule: a gradient is reduced if, and only if, it came
out of the wrapper's own forward. One that did not (``model.module(x)``, a method, a second
backward) stays this rank's, and the optimizer guard refuses to step with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from lockstep import reduction_context
from lockstep.errors import (
    PeerLostError,
    WrongUseError,
)
from lockstep.sync import guard, round_checks
from lockstep.sync.buckets import set_aside
from lockstep.sync.captured_gradients import CapturedGradients
from lockstep.sync.ddp_model import ReducedModel, checked_ddp_args
from lockstep.sync.ddp_round import Round, came_twice
from lockstep.sync.graph_task import call_at_end, nesting_depth
from lockstep.sync.reducer import WEIGHTED
from lockstep.sync.replica_checks import compare_structures
from lockstep.sync.synced_tensors import find_synced_tensors, refuse_shared
from lockstep.sync.tensor_broadcast import broadcast_tensors
from lockstep.sync.window_weights import Units, WindowWeights
from lockstep.sync.windowed_sync import WindowedSync

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lockstep.group import Group
    from lockstep.sync.buckets import Slot
from lockstep.sync.reducer import Contribution

_OUTSIDE: Final = (
    "it did not come out of the forward of the model that register() returned (model.module,"
    " another method, the unwrapped model), a parameter of the model got none, or a second"
    " backward followed one forward",
    "call the model that register() returned; one backward for each forward; for layers that are"
    ' not always used: register(..., ddp_args={"find_unused_parameters": True})',
)


class DDPSync(WindowedSync):
    """See `Synchroniser`. Wraps the modules that have something to train.

    Attributes:
        models: what to use instead of the modules, in their order.
        rounds: how many reductions there have been.
        full_round: always 0: the guard looks at each gradient.
        stale_advice: for the guard, why a gradient was not reduced, and what to type.
    """

    stale_advice = _OUTSIDE

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        group: Group,
        *,
        ddp_args: Mapping[str, Any],
        bucket_cap_mb: float = 25,
        buffers: str = "after_backward",
        averages: bool = True,
    ) -> None:
        arguments = {"bucket_cap_mb": bucket_cap_mb, **checked_ddp_args(ddp_args)}
        found = find_synced_tensors(modules)
        guard.refuse_attached(found.parameters, "detach() the synchronisation that has it")
        self._found = found
        self._settings = [sorted(map(repr, arguments.items())), buffers, averages]
        compare_structures(group, found, self._settings)
        units = Units(group.size, fixed=not averages)
        super().__init__(modules, group, found, units, averages=averages)
        forward_buffers = arguments.get("forward_sync_buffers", True)
        self._keeps_buffers = bool(arguments.get("broadcast_buffers", forward_buffers))
        self._syncs_buffers = buffers == "after_backward" and self._keeps_buffers
        self.finds_unused = bool(arguments.get("find_unused_parameters"))
        self._copies = bool(arguments.get("gradient_as_bucket_view"))
        broadcast_tensors(group, [slot.param for slot in self._slots], cap_bytes=2**25)
        self._buffers.broadcast(group, cap_bytes=2**25)
        self._places = [slot.param.data_ptr() for slot in self._slots]
        self._kinds = [_kind(slot.param) for slot in self._slots]
        self._of_param = {id(slot.param): slot for slot in self._slots}
        self.models = self._wrapped(modules, arguments)
        self._reduced = [model for model in self.models if isinstance(model, ReducedModel)]
        self._model_of = {slot: model for model in self._reduced for slot in model.slots}
        self._used: set[Slot] = set()
        self._arrived: set[Slot] = set()  # in the backward that runs
        self._round = Round(self, self._reduced, self._used)
        self._arrive = self._note_arrival
        self._hook_parameters()
        guard.protect(self, self._slots)

    def _wrapped(
        self, modules: Sequence[torch.nn.Module], arguments: Mapping[str, Any]
    ) -> list[torch.nn.Module]:
        refuse_shared(modules, 'put both into one module, or leave out sync="ddp"')
        wrapped: list[torch.nn.Module] = []
        for place, module in enumerate(modules):
            slots = [s for p in module.parameters() if (s := self._of_param.get(id(p)))]
            trains = any(slot.param.requires_grad for slot in slots)
            wrapped.append(
                ReducedModel(module, place, slots, self, arguments) if trains else module
            )
        return wrapped

    # ------------------------------------------------------------------ what the loops call

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, **backward_kwargs: Any
    ) -> None:
        """Run backward, which reduces what came out of the wrappers' forwards.

        Args:
            loss: what to differentiate; a scalar, or with ``gradient=`` of any shape.
            weight: what the loss counts for; None: as a plain ``loss.backward()``.
            backward_kwargs: for ``Tensor.backward``.

        Gradient:
            sum over ranks and window of weight * d loss / sum of weights, added to what
            earlier rounds left. Under `no_sync`: nothing is reduced yet.

        Collective:
            Every rank, if only by `reduce_pending`. For each model a small all-reduce and one
            per bucket; with several models they do not overlap backward.

        Raises:
            WeightError: a bad weight, or weights that add up to zero.
            GradientNotReducedError: a parameter got no gradient, or the ranks ran backward
                through different models.
            PeerLostError: another rank went away.
        """
        self._backward(loss, weight, backward_kwargs)

    def reduce_pending(self) -> None:
        """Follow the peers' backward with what is there, or with nothing.

        Gradient:
            As after a backward. If no rank brings anything, gradients stay as they are.

        Collective:
            Every rank: this, or a backward.

        Raises:
            PeerLostError: another rank went away.
        """
        self.attached()
        self._check_left_gradients()
        if self._window.kind is None:
            self._keep_earlier()
        unknown = self._late.with_gradient()
        if unknown:
            self._window.faults.append({"kind": "unknown", "names": unknown})
        try:
            self._round.follow()
        except BaseException:
            self._reset(broken=True)
            raise
        self._finish()

    def forget_window(self) -> None:
        """Drop the gradients that were accumulated since the last round."""
        for slot in self._slots:
            slot.param.grad = None
        self._reset()

    def take_shard(self, shard: int) -> NoReturn:
        """Not under DDP, whose buckets mix what its order mixes."""
        raise WrongUseError('sums over shards in a fixed order need sync="replicate"')

    last_shard = take_shard

    def broadcast_buffers(self) -> None:
        """Overwrite every rank's buffers with rank 0's, unless ``ddp_args`` say not to.

        Gradient:
            None: buffers have none.

        Collective:
            Every rank. Blocks. One broadcast.
        """
        if self._keeps_buffers:
            self._buffers.broadcast(self.attached(), cap_bytes=2**25)

    def part(self) -> bool:
        """Leave a group that has broken. The wrappers, which loops hold, stay."""
        if self._group is not None:
            reduction_context.deliver(None)
            self._reset(broken=True)
            self._group = None
        return bool(self._hooks)

    def join(self, group: Group) -> None:
        """Belong to `group`, after `part`.

        Gradient:
            None: what was accumulated is dropped.

        Collective:
            Every rank of `group`. Two small all-gathers.

        Raises:
            ReplicasDifferError: the ranks' models differ.
        """
        compare_structures(group, self._found, self._settings)
        self.place = f"rank {group.rank} of {group.size}"
        self._units = Units(group.size, fixed=not self.averages)
        self._captures = CapturedGradients(self._slots)  # a step that is made again asks again
        self._step = self._steps_taken = 0  # a rank that is new has taken none
        self._group = group
        self._is_broken = False
        self._reset()

    def detach(self) -> None:
        """Take all hooks off and forget the group; the wrappers become their modules."""
        if not self._hooks:
            return
        reduction_context.deliver(None)
        self._unhook_parameters()
        self._late.release()
        for model in self._reduced:
            model.release()
        self._reset()
        self._group = None
        guard.release(self, self._slots)

    # ------------------------------------------------------------------ for guard and models

    @property
    def step(self) -> int:
        return self._step

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @property
    def has_late_parameters(self) -> bool:
        """Parameters came later: a rank may have their gradients, and another not."""
        return self._late.are_there()

    def refuse_broken(self) -> None:
        """Before a forward: its backward could not be reduced."""
        self.attached()
        pairs = zip(self._slots, self._kinds, strict=True)
        moved = [slot.name for slot, kind in pairs if _kind(slot.param) != kind]
        if moved:
            raise round_checks.refused("moved", moved, self.place)
        places = [slot.param.data_ptr() for slot in self._slots]
        if places != self._places:
            # To another dtype and back: autograd accumulates where DDP's hooks are not.
            self._places = places
            for model in self._reduced:
                model.forget()

    # ------------------------------------------------------------------ a backward

    def _note_arrival(self, slot: Slot) -> None:
        if self._round.kept is None or not self.is_borrowed:
            self._used.add(slot)
        slot.passed = 0
        self._arrived.add(slot)
        if self.finds_unused and slot in self._model_of:
            self._model_of[slot].marked.add(slot)
        self._round.note_arrival(slot)

    def _enter_task(self, slot: Slot) -> bool:
        adds_up = super()._enter_task(slot)
        if adds_up and torch.is_grad_enabled():
            raise round_checks.refused("graph", [slot.name], self.place)  # DDP would fail in C++
        # DDP takes what a reentrant checkpoint hides from it for unused, and fails in C++ when
        # its gradient comes after all.
        is_awaited = slot in self._model_of and self._model_of[slot].is_waiting
        if adds_up and self.finds_unused and nesting_depth() > 0 and is_awaited:
            raise came_twice(self.place, slot.name)
        return adds_up

    def _begin_plain(self) -> None:
        self._is_open = True
        self._show_marked()
        self._at_end(self._finish_plain)

    def _at_end(self, function: Callable[[], None]) -> None:
        # Twice: DDP's own call at the end, which writes gradients, is queued in between.
        call_at_end(lambda: call_at_end(function, self._fail), self._fail)

    def _show_marked(self) -> None:
        for model in self._reduced:
            model.show_marked()

    def _finish_plain(self) -> None:
        if self._is_open:
            self._finish()

    def _drive(self, run: Callable[[], None], weight: float | None) -> None:
        self._is_running = True
        if weight == 0.0:
            # Weight zero: nothing of it may stay, and zero times NaN would.
            self._round.kept = self._own_memory(set_aside(self._slots)[0])
        if not self._is_paused:
            self._show_marked()
        try:
            with reduction_context.backward_of(self.attached(), weight, self._window.aside_by_id):
                run()
            self._put_back_kept()
        except RuntimeError as error:
            self._fail()
            if "mark a variable ready only once" not in str(error):
                raise
            raise came_twice(self.place, str(error).splitlines()[0]) from error
        except BaseException:
            self._fail()
            raise
        finally:
            self._is_running = False
        if self._is_paused:
            self._leave_window_open()
        else:
            self._finish()

    def _fail(self) -> None:
        is_broken = self._round.has_sent
        kept, self._round.kept = self._round.kept, None
        if kept is not None:
            for slot in self._slots:
                slot.param.grad = kept.get(slot)
        super()._fail()
        self._is_broken = self._is_broken or is_broken
        for model in self._reduced:
            model.forget()  # DDP waits for what did not come, also where no bucket was full

    def _put_back_kept(self) -> None:
        kept, self._round.kept = self._round.kept, None
        if kept is None:
            return
        landed = {slot for model in self._round.landed() for slot in model.reduced}
        for slot in self._slots:
            if slot not in landed:
                is_used = slot.param.grad is not None and not self.is_borrowed
                zero = torch.zeros_like(slot.param) if is_used and slot not in kept else None
                slot.param.grad = kept.get(slot, zero)

    def _keep_earlier(self) -> None:
        super()._keep_earlier()
        self._window.aside = self._own_memory(self._window.aside)

    def _own_memory(self, grads: dict[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """Copies, where DDP's next bucket will use the memory of its last one's views."""
        return {slot: grad.clone() for slot, grad in grads.items()} if self._copies else grads

    # ------------------------------------------------------------------ for a round

    def carry(self, model: ReducedModel, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: a bucket is full."""
        if not self._is_paused:
            return self._round.carry(model, bucket)
        # The forward ran outside `no_sync` and its backward inside: these stay local.
        flat = bucket.buffer()
        devices = [flat.device] if flat.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        future.set_result(flat)
        return future

    def contribution(self) -> Contribution:
        return self._window.contribution(self._units)

    def slot_of(self, param: torch.Tensor) -> Slot:
        slot = self._of_param.get(id(param))
        if slot is None:
            raise round_checks.refused(
                "unknown", [f"one of shape {tuple(param.shape)}"], self.place
            )
        return slot

    # ------------------------------------------------------------------ the end of a round

    def _finish(self) -> None:
        try:
            window, landed, own = self._finish_round()
        except BaseException:
            self._fail()
            raise
        if not self.needs_guard:
            # A rank alone has whole gradients, also where DDP has not looked at them.
            self._divide_alone(own, window)
            own = set()
        self._complete(window, is_round=landed, unreduced=own)

    def _finish_round(self) -> tuple[WindowWeights, bool, set[Slot]]:
        """Its window, whether a model's gradients were reduced, and what was not."""
        self._end_together()
        landed, sums, window = self._round.landed(), self._round.sums, self._window
        for model in self._round.led():
            model.has_reduced()
        if landed:
            self.rounds += 1
        reduced = {slot for model in landed for slot in model.reduced}
        for slot in reduced:
            slot.passed = self.rounds
            if self._copies and slot.param.grad is not None:
                # A view of DDP's bucket, which the next backward writes: the user may keep it.
                slot.param.grad = slot.param.grad.clone()
            slot.deliver(slot.param.grad)
        if sums is not None:
            self._units.learn(sums)
        self._reset()
        if landed and self._syncs_buffers:
            self.broadcast_buffers()
        return window, bool(landed), set(self._slots) - reduced

    def _faults_at_end(self) -> list[dict[str, Any]]:
        """What a backward has left that no rank may use."""
        landed = {slot for model in self._round.landed() for slot in model.reduced}
        left = self._arrived - landed
        halves = [m for m in self._reduced if m.is_waiting and not left.isdisjoint(m.reduced)]
        missing = {s.name: None for m in halves for s in m.reduced if s not in self._arrived}
        hooked = [s.name for s in left if s.number in self._hooked and self.needs_guard]
        found = {
            "unknown": self._late.with_gradient(),
            "unfinished": list(missing) if halves else [],
            "waiting": sorted(hooked),
        }
        return [{"kind": kind, "names": names[:8]} for kind, names in found.items() if names]

    def _end_together(self) -> None:
        faults = self._faults_at_end()
        self._window.faults += faults
        refusal = (
            round_checks.refused(faults[0]["kind"], faults[0]["names"], self.place)
            if faults
            else None
        )
        try:
            self._round.finish()
        except PeerLostError as lost:
            # The peers are somewhere else, and this is why.
            raise refusal or lost from lost
        if refusal is not None:
            raise refusal

    def _divide_alone(self, slots: set[Slot], window: WindowWeights) -> None:
        if self.averages and window.kind == WEIGHTED and window.weight > 0.0:
            for slot in slots:
                if slot.param.grad is not None:
                    slot.param.grad.div_(window.weight)

    def _reset(self, *, broken: bool = False) -> None:
        if broken:
            self._is_broken = self._is_broken or self._round.has_sent
        for model in self._reduced if broken else self._round.unfinished():
            model.forget()
        for model in self._reduced:
            model.hide_marked(self._arrived)
        self._window = WindowWeights()
        self._used.clear()
        self._arrived.clear()
        self._round = Round(self, self._reduced, self._used)
        self._tasks.clear()
        self._is_open = False
        self._is_running = False
        self._has_failed = False


def _kind(param: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """What DDP's buckets are made for."""
    return param.shape, param.dtype, param.device
