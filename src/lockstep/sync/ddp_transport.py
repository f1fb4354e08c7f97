# SPDX-License-Identifier: Apache-2.0
"""`DDPTransport`: a transport whose buckets are those of torch's DistributedDataParallel.

DDP wraps each model that has something to train, and fills its buckets; `DDPRound` reduces them.
DDP adds its rule: a gradient is reduced if, and only if, it came out of the wrapper's own forward.
One that did not (``model.module(x)``, a method, a second backward) stays this rank's, and the
optimizer guard refuses to step with it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.error_texts import first_line
from lockstep.errors import ConfigurationError, PeerLostError
from lockstep.sync import round_error_texts
from lockstep.sync.bucket_order import BucketOrder
from lockstep.sync.ddp_round import DDPRound, gradient_twice_error
from lockstep.sync.ddp_wrapper import DDPWrapper
from lockstep.sync.end_of_backward import nesting_depth
from lockstep.sync.local_parameters import is_local
from lockstep.sync.round_contribution import WEIGHTED, Fault, digest_of
from lockstep.sync.transport_protocol import RoundResult, Transport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from lockstep.sync.buckets import Slot
    from lockstep.sync.round_contribution import Contribution
    from lockstep.sync.transport_protocol import Gradients, RoundController

_STALE: Final = (
    "it did not come out of the forward of the model that register() returned (model.module,"
    " another method, the unwrapped model), a parameter of the model got none, or a second"
    " backward followed one forward",
    "call the model that register() returned; one backward for each forward; for layers that are"
    ' not always used: register(..., ddp_args={"find_unused_parameters": True})',
)


class DDPTransport(Transport):
    """See `Transport`.

    Args:
        controller: defines the rounds in which the transport moves gradients.
        slots: the synchronised parameters.
        modules: those that the parameters are of.
        arguments: what DDP is made with.

    Attributes:
        models: the wrapped modules, for use instead of the modules, in their order.
    """

    can_rejoin = True
    ends_late = True  # DDP writes its buckets into parameter.grad at the end of a backward
    stale_advice = _STALE

    def __init__(
        self,
        controller: RoundController,
        slots: Sequence[Slot],
        modules: Sequence[torch.nn.Module],
        arguments: Mapping[str, Any],
    ) -> None:
        self._controller = controller
        self._slots = slots
        self._finds_unused = bool(arguments.get("find_unused_parameters"))
        self._has_bucket_views = bool(arguments.get("gradient_as_bucket_view"))
        self._addresses = [slot.param.data_ptr() for slot in slots]
        self._kinds = [_kind(slot.param) for slot in slots]
        self._slot_of_param = {id(slot.param): slot for slot in slots}
        self.models = self._wrap_models(modules, arguments)
        self._reduced = [model for model in self.models if isinstance(model, DDPWrapper)]
        self._model_of = {slot: model for model in self._reduced for slot in model.slots}
        self._used: set[Slot] = set()  # since the last round
        self._arrived: set[Slot] = set()  # in the backward that runs
        self._sends_early: bool | None = None  # no backward has ended, so nobody knows
        self._followed: list[int] = []  # see `BucketOrder.end`; of the last round
        group = controller.attached_group()
        self._devices = {group.device, *(slot.param.device for slot in slots)}
        self._order = BucketOrder(group, self._devices)
        self._new_round()

    def _wrap_models(
        self, modules: Sequence[torch.nn.Module], arguments: Mapping[str, Any]
    ) -> list[torch.nn.Module]:
        _refuse_shared(modules)
        wrapped: list[torch.nn.Module] = []
        for place, module in enumerate(modules):
            slots = [s for p in module.parameters() if (s := self._slot_of_param.get(id(p)))]
            trains = any(slot.param.requires_grad for slot in slots)
            wrapped.append(DDPWrapper(module, place, slots, self, arguments) if trains else module)
        return wrapped

    def _new_round(self) -> None:
        self._used.clear()
        self._arrived.clear()
        self._round = DDPRound(
            self._controller,
            self._reduced,
            self._slot_of_param,
            self._used,
            finds_unused=self._finds_unused,
        )

    # ------------------------------------------------------------------ what DDP calls

    @property
    def is_paused(self) -> bool:
        """Whether `no_sync` is active."""
        return self._controller.is_paused

    def refuse_broken(self) -> None:
        """Before a forward: raise if its backward could not be reduced."""
        self._controller.attached_group()
        pairs = zip(self._slots, self._kinds, strict=True)
        moved = [slot.name for slot, kind in pairs if _kind(slot.param) != kind]
        if moved:
            raise round_error_texts.fault_error(
                *Fault.of("moved", moved), where=self._controller.place
            )
        addresses = [slot.param.data_ptr() for slot in self._slots]
        if addresses != self._addresses:
            # After `.to` another dtype and back, autograd accumulates in nodes without DDP's hooks.
            self._addresses = addresses
            for model in self._reduced:
                model.forget()

    def reduce_bucket(self, model: DDPWrapper, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: reduce a full bucket."""
        if not self._controller.is_paused:
            return self._round.reduce_bucket(model, bucket)
        # The forward ran outside `no_sync` and its backward inside: these stay local.
        flat = bucket.buffer()
        devices = [flat.device] if flat.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        future.set_result(flat)
        return future

    # ------------------------------------------------------------------ a backward

    needs_on_accumulated = True

    def on_accumulated(self, slot: Slot) -> None:
        """See `Transport`."""
        if self._round.replacement_gradients is None or not self._controller.weights.is_borrowed:
            self._used.add(slot)
        slot.last_round = 0
        self._arrived.add(slot)
        if self._sends_early is None:
            self._order.note_arrival()
        if self._finds_unused and slot in self._model_of:
            self._model_of[slot].marked.add(slot)
        self._round.note_arrival(slot)

    def check_backward(self, slot: Slot) -> None:
        """See `Transport`: refuses what DDP would fail at in C++."""
        if torch.is_grad_enabled():
            fault = Fault.of("graph", [slot.name])
            raise round_error_texts.fault_error(*fault, where=self._controller.place)
        # DDP takes parameters that a reentrant checkpoint hides for unused, and fails when their
        # gradients come after all.
        is_awaited = slot in self._model_of and self._model_of[slot].is_waiting
        if self._finds_unused and nesting_depth() > 0 and is_awaited:
            raise gradient_twice_error(self._controller.place, slot.name)

    @contextmanager
    def backward(self, replacement_gradients: Gradients | None) -> Iterator[None]:
        """See `Transport`."""
        self._round.replacement_gradients = replacement_gradients
        try:
            yield
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise gradient_twice_error(self._controller.place, first_line(error)) from error
        finally:
            self._round.replacement_gradients = None

    def own_memory(self, gradients: Gradients) -> Gradients:
        """See `Transport`: copies, where DDP's next bucket uses the memory of the last one's."""
        if not self._has_bucket_views:
            return gradients
        return {slot: grad.clone() for slot, grad in gradients.items()}

    @property
    def already_reduced(self) -> Collection[Slot]:
        """See `Transport`."""
        return {slot for model in self._round.reduced_models() for slot in model.reduced}

    # ------------------------------------------------------------------ rounds

    def begin(self, contribution: Contribution, step: int) -> None:
        """See `Transport`.

        Collective:
            As DDP fills buckets: for each model a small all-reduce, then one per bucket; with
            several models they do not overlap backward.
        """
        self._begin_order(contribution)
        self._round.set_contribution(contribution, step)
        for model in self._reduced:
            model.fill_marked()

    def _begin_order(self, contribution: Contribution) -> None:
        # The message of a turn goes ahead of its buckets, so it tells of the round before.
        contribution.has_others = self._sends_early is False
        group = self._controller.attached_group()
        if self._followed:
            contribution.digest = digest_of(group.size, contribution.digest, *self._followed)
        if self._order.group is not group:
            self._order = BucketOrder(group, self._devices)
        self._order.begin()
        self._round.set_order(self._order, sends_early=self._sends_early is True)

    def follow(self, contribution: Contribution, step: int, faults: Sequence[Fault]) -> RoundResult:
        """See `Transport`."""
        self._begin_order(contribution)
        self._round.set_contribution(contribution, step)
        contribution.faults += faults
        self._round.follow()
        return self.finish([])

    def finish(self, faults: Sequence[Fault]) -> RoundResult:
        """See `Transport`."""
        self._note_order()
        self._exchange_ending(faults)
        already_reduced, reduced = bool(self._round.reduced_models()), self.already_reduced
        for model in self._round.models_reduced_by_backward():
            model.note_reduction()
        for slot in reduced:
            if self._has_bucket_views and slot.param.grad is not None:
                # A view of DDP's bucket, which the next backward writes: the user may keep it.
                slot.param.grad = slot.param.grad.clone()
            slot.set_reduced(slot.param.grad)
        sums, mine = self._round.sums, self._round.contribution
        own = set(self._slots).difference(reduced)
        if not self._controller.needs_guard:
            # A rank alone has whole gradients, also where DDP has not looked at them.
            self._divide(own, mine)
            own = set()
        self._forget_unfinished()
        return RoundResult(
            took_place=already_reduced,
            has_gradients=already_reduced,
            used_all=False,  # the guard looks at each gradient
            sums_to_judge=[] if sums is None else [(sums, mine)],
            unreduced=own,
        )

    def _note_order(self) -> None:
        has_others, self._followed = self._order.end()
        if has_others or not self._order.is_known:
            self._sends_early = False
        elif self._order.has_watched:
            self._sends_early = True

    def _exchange_ending(self, faults: Sequence[Fault]) -> None:
        """Tell the peers how this rank's backward has ended.

        Raises:
            LockstepError: the backward has left gradients that no rank may use.
        """
        found = [*faults, *self._faults_at_end()]
        self._round.contribution.faults += found
        refusal = None
        if found:
            refusal = round_error_texts.fault_error(*found[0], where=self._controller.place)
        try:
            self._round.finish()
        except PeerLostError as lost:
            # This rank's refusal explains why the peers are at another place.
            raise refusal or lost from lost
        if refusal is not None:
            raise refusal

    def _faults_at_end(self) -> list[Fault]:
        left = self._arrived.difference(self.already_reduced)
        halves = [m for m in self._reduced if m.is_waiting and not left.isdisjoint(m.reduced)]
        missing = {s.name: None for m in halves for s in m.reduced if s not in self._arrived}
        waits = self._controller.has_user_hooks
        hooked = [s.name for s in left if waits(s) and self._controller.needs_guard]
        found = {"unfinished": list(missing), "waiting": sorted(hooked)}
        return [Fault.of(kind, names[:8]) for kind, names in found.items() if names]

    def _divide(self, slots: Collection[Slot], mine: Contribution) -> None:
        if self._controller.weights.averages and mine.kind == WEIGHTED and mine.weight > 0.0:
            for slot in slots:
                if slot.param.grad is not None:
                    slot.param.grad.div_(mine.weight)

    @property
    def is_half_sent(self) -> bool:
        """See `Transport`."""
        return self._round.has_sent_buckets

    def reset(self, *, has_failed: bool) -> None:
        """See `Transport`."""
        if has_failed:
            self._followed = []
            for model in self._reduced:
                model.forget()  # DDP waits for missing gradients, also if no bucket was full
        self._forget_unfinished()

    def _forget_unfinished(self) -> None:
        for model in self._round.unfinished_models():
            model.forget()
        for model in self._reduced:
            model.clear_marked(self._arrived)
        self._new_round()

    def send_late(self) -> None:
        """See `Transport`."""
        self._sends_early = False

    def accept_changes(self) -> None:
        """See `Transport`."""
        for slot in self._slots:
            slot.accept_changes()

    def close(self) -> None:
        """See `Transport`: the wrappers become their modules."""
        self._order.close()
        for model in self._reduced:
            model.release()


def _kind(param: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """The properties of a parameter on which DDP's buckets depend."""
    return param.shape, param.dtype, param.device


def _refuse_shared(modules: Sequence[torch.nn.Module]) -> None:
    """Refuse a parameter of two modules, each of which a wrapper of its own reduces.

    Raises:
        ConfigurationError: names the first such parameter.
    """
    owners: dict[int, int] = {}
    for place, module in enumerate(modules):
        for name, param in module.named_parameters():
            if owners.setdefault(id(param), place) != place and not is_local(param):
                raise ConfigurationError(
                    f"`{name}` belongs to two registered modules",
                    cause="each is reduced by itself, and this gradient would be reduced twice",
                    fix='put both into one module, or leave out sync="ddp"',
                )
