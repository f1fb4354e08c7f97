# SPDX-License-Identifier: Apache-2.0
"""`ReductionRounds`: what the global gradient is, and when optimizers may use it.

Backwards come in windows. A window holds the backwards since the last round: one, or several
under `no_sync`. The backward that closes it is the only one with a round of reduction, in which
every rank contributes its window's gradients and their weight. The global gradient is

    sum over ranks and window of weight * d loss / sum of weights

added to the gradients that earlier rounds have left. The numbers travel through a `Transport`,
which knows nothing of this; `GradientSync` is the surface that programs see.

Invariants:

- Every rank takes part in the same rounds in the same order, with a backward or without one.
- A rank that has to refuse something contributes zeros and a fault. All ranks then refuse
  together, after the round's last collective, so that none waits for one that has raised.
- Once a part of a round has been sent and the rest has not, the ranks are at different places:
  nothing more is reduced over this group (`mark_broken`).
- After a refusal or a failure, gradients of earlier rounds are back in ``parameter.grad``.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep import reduction_context
from lockstep.process_group_argument import refuse_late_peers
from lockstep.sync import round_checks, round_error_texts
from lockstep.sync.accumulation_window import AccumulationWindow
from lockstep.sync.autograd_grad_watch import AutogradGradWatch
from lockstep.sync.backward_listener import BackwardListener
from lockstep.sync.buckets import Slot
from lockstep.sync.earlier_gradients import EarlierGradients
from lockstep.sync.end_of_backward import call_at_end
from lockstep.sync.late_parameters import LateParameters
from lockstep.sync.leaves_outside import LeavesOutside
from lockstep.sync.local_gradients import LocalGradients
from lockstep.sync.round_contribution import PLAIN, WEIGHTED, Contribution, Fault, RoundDigest
from lockstep.sync.weighted_loss_scale import BatchWeights, as_weight
from lockstep.sync.zero_weight_backward import GradientsBefore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lockstep.group import Group
    from lockstep.sync.autograd_grad_watch import HeldIds
    from lockstep.sync.ordered_reducer import ShardGradient
    from lockstep.sync.round_contribution import RoundTotals, UnreadTotals
    from lockstep.sync.synced_tensors import SyncedTensors
    from lockstep.sync.transport_protocol import RoundResult, TransportFactory


class ReductionRounds:
    """One rank's side of the rounds.

    Args:
        modules: the roots of the synchronised modules.
        group: the peers; until `detach`.
        found: the parameters and buffers on which the ranks have agreed.
        make_transport: makes the transport for these parameters.
        cap_bytes: how large a bucket may grow.
        averages: False if the losses are sums over their batches: the gradients are added and
            not divided.
        num_shards: see `BatchWeights`.
        after_round: a collective after each round (buffers), before anything is refused.

    Attributes:
        place: this rank among its peers, for errors.
        num_rounds: how many rounds there have been.
        last_full_round: the last one to which this rank has brought every gradient.
        slots: the synchronised parameters.
        steps_taken: steps of optimizers since the group formed.
        weights: of this rank's batches.
        transport: moves the gradients between the ranks.
        listener: notices backwards by hooks on the parameters.
        local: the gradients of this rank's own parameters.
        is_paused: inside `no_sync`.
        has_added: see `watch_gradients`.
        late: what was added to the modules since.
        has_accumulated: the program left `no_sync` since the last optimizer step.
        digest: of this sync among those of the group.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        group: Group,
        found: SyncedTensors,
        make_transport: TransportFactory,
        *,
        cap_bytes: int,
        averages: bool,
        num_shards: int | None,
        after_round: Callable[[], None] | None,
    ) -> None:
        self.place = group.place
        self.num_shards = num_shards
        self.weights = BatchWeights(group, num_shards, averages=averages)
        self.num_rounds, self.last_full_round, self.digest = 0, 0, RoundDigest(1, 0)
        named = enumerate(found.parameters.items())
        self.slots = [Slot(number, name, param, self) for number, (name, param) in named]
        self.is_paused = self.has_accumulated = self.has_added = self._has_failed = False
        self._group: Group | None = group
        self._after_round, self._is_broken = after_round, False
        self.step = 0  # of the run, or of the optimizers, to which rounds belong
        self.steps_taken = self._numbers_of_steps = self._watched_from = 0
        self._unread: UnreadTotals | None = None
        self._accumulated: list[Slot] = []  # whose gradient is a sum with those of earlier rounds
        self.local = LocalGradients(found.local)
        self._outside = LeavesOutside([*found.local, *found.parameters.values()], self.place)
        self.late = LateParameters(modules, found.parameters.values())
        self._new_window()
        self.transport = make_transport(self, self.slots, found.signature(), cap_bytes)
        self._grad_watch = AutogradGradWatch(self.slots, can_wait=self.transport.steps_alike)
        self.listener = BackwardListener(
            self.slots, self.transport, self.backward_began, self._autograd_grad_called
        )

    def _new_window(self) -> None:
        self._window = AccumulationWindow()
        self._earlier = EarlierGradients(self.slots)
        self._contribution: Contribution | None = None  # of the round that has begun

    # ------------------------------------------------------------------ windows

    def begin_step(self, step: int) -> None:
        """See `GradientSync.begin_step`."""
        # A step that was left out shows in the next round.
        self.step = 16 * step + self._numbers_of_steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `GradientSync.no_sync`."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before
            self.has_accumulated = True

    def watch_gradients(self) -> None:
        """See `GradientSync.watch_gradients`."""
        self._watched_from, self.has_added = self.num_rounds, False

    def backward(
        self, loss: torch.Tensor, weight: float | None, backward_kwargs: dict[str, Any]
    ) -> None:
        """See `GradientSync.backward`."""
        scale: float | None = None
        if weight is None:
            self._open_window(PLAIN)
        else:
            weight = as_weight(weight, self.place)
            self._judge_unread_sums()  # the weights of the last round set the unit of the next one
            given = backward_kwargs.get("gradient")
            scale, loss, backward_kwargs["gradient"] = self.weights.scale_loss(loss, given, weight)
            self._outside.look_at(loss, scale)
            self._open_window(WEIGHTED)
            self._window.weight += scale
        self._run_backward(lambda: loss.backward(**backward_kwargs), scale)

    def _open_window(self, kind: str) -> None:
        """At the start of a backward, maybe the first of its window: note `kind` and weight."""
        self.attached_group()
        self._judge_unread_sums()
        self.transport.open_window(kind, is_first=self._window.kind is None)
        if self._has_failed:
            self._reset()
            self.attached_group()
        self._check_left_gradients()
        is_first = self._window.kind is None
        self._window.enter(kind, self.weights, self.place)
        if is_first:
            self._set_earlier_aside()
            if kind == WEIGHTED:
                self.local.open_window()

    def _set_earlier_aside(self) -> None:
        """Set gradients of earlier rounds aside: no round reduces them, no hook sees them again."""
        self.listener.find_user_hooks()
        held = self._earlier.set_aside(self.transport.own_memory)
        if any(max(slot.last_round, self.last_full_round) <= self._watched_from for slot in held):
            self.has_added = True

    def _check_left_gradients(self) -> None:
        if self._window.check_gradients(self.slots, self._earlier.by_slot):
            self.forget_window()

    def keep_window(self) -> None:
        """See `GradientSync.keep_window`."""
        if self._window.kind is None:
            return
        if self._window.check_gradients(self.slots, self._earlier.by_slot):
            self._window.faults.append(Fault("edited_in_window"))
            self._window.remember_gradients(self.slots)  # the window stays, to be refused
        self._window.hide_gradients(self.slots)

    def forget_window(self) -> None:
        """Drop the gradients since the last round. Every rank does, or none; no collective."""
        for slot in self.slots:
            slot.param.grad = None
        self.local.forget_window()
        self._reset()

    def pack_shard(self) -> ShardGradient:
        """See `GradientSync.pack_shard`."""
        gradient = self.transport.ordered_reducer.pack_shard(self._window.pack_weight())
        self._leave_window_open()
        return gradient

    @contextmanager
    def outside_window(self) -> Iterator[None]:
        """See `GradientSync.outside_window`."""
        before, self._window = self._window, replace(self._window)
        try:
            yield
        finally:
            self._window = before

    def _leave_window_open(self) -> None:
        """After a backward under `no_sync`: remember the gradients that it left."""
        self.listener.is_running = False
        self._window.remember_gradients(self.slots)

    # ------------------------------------------------------------------ backwards

    def backward_began(self, slot: Slot) -> None:
        """Called at the first gradient, of `slot`, of a backward that adds to ``parameter.grad``.

        The backward is one of `_run_backward`, a part of a running one (a reentrant checkpoint), or
        a plain ``loss.backward()`` of the program's own.
        """
        is_plain = not self.listener.is_running
        if is_plain:
            self._refuse_weight_of_another(slot)
            self._open_window(PLAIN)
        if torch.is_grad_enabled():
            self._window.faults.append(Fault.of("graph", [slot.name]))
        if is_plain:
            self.listener.is_running = True
            if self.is_paused:
                self._at_end(self._leave_window_open)
            else:
                self._at_end(self._finish_plain)
                self._begin_round()
        self.transport.check_backward(slot)

    def _refuse_weight_of_another(self, slot: Slot) -> None:
        driving, group = reduction_context.active(), self._group
        # Other ranks may be threads of this process.
        if driving and driving.at_root and group and driving.group.rank == group.rank:
            fault = Fault.of("weighted_by_other_sync", [slot.name])
            raise round_error_texts.fault_error(*fault, where=self.place)

    def _at_end(self, function: Callable[[], None]) -> None:
        """Call `function` when the running backward has ended and its gradients are in place."""
        call_at_end(function, self._fail, is_last=self.transport.ends_late)

    def _autograd_grad_called(self) -> None:
        """Note that ``torch.autograd.grad`` computes gradients of this rank alone."""
        if self.needs_guard and not self.is_paused:
            self._grad_watch.note(self.place, self.num_rounds, self.steps_taken)

    def _run_backward(self, run: Callable[[], None], weight: float | None) -> None:
        """Run a backward whose root carries `weight`; the round begins before it."""
        before: GradientsBefore | None = None
        self.listener.is_running = True
        try:
            if weight == 0.0:
                # No value of this backward may stay; scaling by zero would keep NaN.
                before = GradientsBefore(self.slots, self.local, self.transport)
            if not self.is_paused:
                self._begin_round()
            by_id = {id(slot.param): grad for slot, grad in self._earlier.by_slot.items()}
            around = reduction_context.activate_for_backward(self.attached_group(), weight, by_id)
            with self.transport.backward(before.by_slot if before else None), around:
                run()
        except BaseException:
            if before is not None:
                before.put_back()
            self._fail()
            raise
        finally:
            self.listener.is_running = False
        if before is not None:
            before.put_back_with_zeros(is_borrowed=self.weights.is_borrowed)
        if self.is_paused:
            self._leave_window_open()
        else:
            self._finish_round(self.transport.finish)

    def _fail(self) -> None:
        """Clean up after a backward or a round that raised midway."""
        self._earlier.add_to_partial()
        self._reset(has_failed=True)

    # ------------------------------------------------------------------ rounds

    def _begin_round(self) -> None:
        self.transport.begin(self._contribute(), self.step)

    def _contribute(self) -> Contribution:
        made = self._window.contribution(self.weights, self._earlier)
        made.asks = self._grad_watch.asks
        made.digest, self._contribution = self.digest.of_round(self.num_rounds), made
        return made

    def reduce_pending(self) -> None:
        """See `GradientSync.reduce_pending`."""
        self.attached_group()
        self._judge_unread_sums()
        self._check_left_gradients()
        if self._window.kind is None:
            self._set_earlier_aside()
        mine = self._contribute()
        self._finish_round(lambda faults: self.transport.follow(mine, self.step, faults))

    def _finish_plain(self) -> None:
        if self._contribution is not None:
            self._finish_round(self.transport.finish)

    def _finish_round(self, finish: Callable[[Sequence[Fault]], RoundResult]) -> None:
        earlier, contribution = self._earlier, self._contribution
        assert contribution is not None
        if self._window.kind == WEIGHTED:
            contribution.weight = self._window.total_weight
            self.local.close_window(contribution.weight if self.weights.averages else 1.0)
        try:
            result = finish(self.late.faults())
        except BaseException:
            self._fail()
            raise
        self._reset()
        if self._after_round is not None and result.took_place:
            self._after_round()
        try:
            # Raise last: every rank has made the same collective calls by now, and can go on.
            self._unread = result.unread
            for sums, mine in result.sums_to_judge:
                self._judge(sums, mine, together=result.read_together)
        except BaseException:
            earlier.put_back()
            raise
        self._note_round(result, earlier)
        if earlier.by_slot or self.listener.hooked or self._grad_watch.is_pending:
            self._add_to_earlier(result, earlier)
        self.local.run_hooks()

    def _judge(self, sums: RoundTotals, mine: Contribution, *, together: bool) -> None:
        group = self.attached_group()
        self._is_broken = round_checks.is_out_of_step(sums, mine, group)
        if sums.others:
            self.transport.send_late()
        round_checks.judge(sums, mine, group, together=together)
        self.weights.update_units(sums)
        # Not before: a refused round has told no rank of a question, and has compared nothing.
        self._grad_watch.asks &= not mine.asks
        self.digest.compare_next([slot.param for slot in self.slots] if sums.asked else [])

    def _judge_unread_sums(self) -> None:
        """Judge sums that were left on the accelerator so that the host need not wait."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._judge(unread.read(), unread.contribution, together=False)

    def _note_round(self, result: RoundResult, earlier: EarlierGradients) -> None:
        if not result.has_gradients:
            # The ranks have compared the gradients that earlier rounds left.
            self.num_rounds += result.took_place and bool(earlier.by_slot)
            return
        self.num_rounds += 1
        if result.used_all:
            self.last_full_round = self.num_rounds
            return
        for slot in self.slots:
            if slot not in result.unreduced:
                slot.note_round(self.num_rounds)

    def _add_to_earlier(self, result: RoundResult, earlier: EarlierGradients) -> None:
        """Run the user's hooks on the round's gradients, and add those of earlier rounds."""
        self._accumulated = list(earlier.by_slot)
        new_round = self.num_rounds if result.took_place else None
        try:
            earlier.add_to_round(self.listener, self._grad_watch, result.unreduced, new_round)
        except BaseException:
            # As if a hook had raised inside the user's backward.
            self._fail()
            raise

    def _reset(self, *, has_failed: bool = False) -> None:
        self._is_broken |= self.transport.is_half_sent  # peers wait, or have read other messages
        self.transport.reset(has_failed=has_failed)
        self.listener.forget_tasks()
        self._new_window()
        self.local.close_window(1.0)  # of a window that no round has closed
        self.listener.is_running, self._has_failed = False, has_failed

    # ------------------------------------------------------------------ the group

    def attached_group(self) -> Group:
        """The group, while gradients can be reduced over it.

        Raises:
            NotAvailableError: after `detach`.
            GradientNotReducedError: an earlier failure left the ranks at different places.
            WrongUseError: there is a world group now, and was none.
        """
        if self._group is None:
            raise round_error_texts.detached_error(self.place)
        if self._group.is_assumed:
            refuse_late_peers()
        if self._is_broken:
            raise round_error_texts.broken_error(self.place)
        return self._group

    def mark_broken(self) -> None:
        """Reduce no more over this group, because its ranks are at different places."""
        self._is_broken = True
        self._reset()

    def leave(self) -> None:
        """Forget a group that has broken; the hooks stay on the parameters."""
        reduction_context.set_batch_weight(None)
        self._reset(has_failed=True)
        self._group = None

    def join(self, group: Group) -> None:
        """Belong to `group`, after `leave`."""
        self.place = group.place
        self.weights = BatchWeights(group, self.num_shards, averages=self.weights.averages)
        self._grad_watch = AutogradGradWatch(self.slots, can_wait=self.transport.steps_alike)
        self.step = self.steps_taken = self._numbers_of_steps = 0  # a new rank has taken none
        self._group, self._is_broken = group, False
        self._reset()

    def detach(self) -> Group | None:
        """Take the hooks off and forget the group; returns it, if there was one to forget."""
        reduction_context.set_batch_weight(None)
        for part in (self.listener, self.late, self.local):
            part.release()
        self.transport.close()
        self._reset()
        self.local.begin_batch(is_borrowed=False)
        group, self._group, self._unread = self._group, None, None
        return group

    # ------------------------------------------------------------------ for the guard

    def note_step(self, number: int) -> None:
        """Note that the optimizer of this number is about to step; see `optimizer_guard`."""
        if self._group is not None:
            self._group.confirm()
        self.step += number
        self.steps_taken += 1
        self._numbers_of_steps += number
        self.has_accumulated = False
        self.transport.accept_changes()
        for slot in self._accumulated:
            slot.accept_changes()

    def holds_own_gradients(self, slots: Sequence[Slot], held: HeldIds) -> bool:
        """Whether local gradients have got into gradients or weights of `slots`."""
        return self._grad_watch.holds_own_gradients(slots, held)

    @property
    def needs_guard(self) -> bool:
        """Whether there are peers; a rank alone has whole gradients, wherever they come from."""
        return self._group is not None and self._group.size > 1

    @property
    def has_no_gradients(self) -> bool:
        """Whether no parameter has a gradient, and none is hidden, or of earlier rounds aside."""
        held = self._earlier.by_slot or self._window.hidden is not None
        return not held and all(slot.param.grad is None for slot in self.slots)

    @property
    def has_open_window(self) -> bool:
        """Whether gradients have arrived since the last round, or a backward failed midway.

        A failed backward leaves the same gradients with a rank alone as in one process.
        """
        return self._window.kind is not None or (self._has_failed and self.needs_guard)

    def has_user_hooks(self, slot: Slot) -> bool:
        """Whether the user has registered hooks on the parameter."""
        return slot.number in self.listener.hooked

    @property
    def has_late_parameters(self) -> bool:
        """Whether parameters were added later: only some ranks may have their gradients."""
        return self.late.has_trainable()

    def is_in_modules(self, param: torch.Tensor) -> bool:
        """Whether `param` is in the synchronised modules now."""
        return self.late.is_in_modules(param)
