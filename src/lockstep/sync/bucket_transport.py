# SPDX-License-Identifier: Apache-2.0
"""`BucketTransport`: flat buckets, summed by all-reduce, by a tree over shards, or by a server.

Which parameters have a place in a bucket follows ``requires_grad``: a parameter that is frozen
when the buckets are made waits outside. When any rank unfreezes it, or has a gradient of it, all
ranks give it a place; they learn of it from the sums of a round, and reduce its gradient in a
second round.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lockstep._torch_compat import version_of
from lockstep.sync import round_error_texts
from lockstep.sync.ordered_reducer import OrderedReducer
from lockstep.sync.reducer import Reducer
from lockstep.sync.round_contribution import Contribution, Fault, UnreadTotals
from lockstep.sync.transport_protocol import RoundResult, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from lockstep.group import Group
    from lockstep.pending_collective import Pending
    from lockstep.sync.buckets import Bucket, Slot
    from lockstep.sync.round_contribution import RoundTotals
    from lockstep.sync.shard_tree_sum import ShardOrder
    from lockstep.sync.transport_protocol import Gradients, RoundController

_STALE: Final = (
    "assigned by hand (after autograd.grad?), or no backward since the last step",
    "use loss.backward(); lockstep.average_gradients serves models that nothing synchronises, and"
    " what a trainer's operator has registered is synchronised",
)


class BucketTransport(Transport):
    """Reduces gradients in flat buckets; see `Transport`.

    Args:
        controller: defines the rounds in which the transport moves gradients.
        slots: the synchronised parameters.
        signature: tells the rounds of one model from those of another; below 64.
        cap_bytes: how large a bucket may grow.
        order: the gradients are those of shards, added up in this order.
        combine: sums a full bucket, in the place of an all-reduce, and waits for the sum. Nothing
            travels before backward has ended: inside it, a rank that waited for a server could
            keep a peer waiting that needs it in a collective of the model's own.
        wait_for_peers: called first at the end of a round; raises if a rank is at another place.
        steps_alike: see `Transport`.

    Attributes:
        reducer: of the parameters that are in buckets.
    """

    stale_advice = _STALE

    def __init__(
        self,
        controller: RoundController,
        slots: Sequence[Slot],
        signature: int,
        cap_bytes: int,
        *,
        order: ShardOrder | None = None,
        combine: Callable[[Group, Bucket], Pending] | None = None,
        wait_for_peers: Callable[[], None] | None = None,
        steps_alike: bool = True,
    ) -> None:
        self.steps_alike = steps_alike
        self._controller = controller
        self._slots = slots
        self._signature = signature
        self._cap_bytes = cap_bytes
        self._order = order
        self._combine = combine
        self._wait_for_peers = wait_for_peers
        self._last_shard: int | None = None
        self._sends_early = True
        self._is_finishing = False
        self._was_unfrozen = False  # a parameter without a bucket, in a backward of this round
        self._on_accumulated: Callable[[Slot], None] | None = None
        self._make_buckets([slot for slot in slots if slot.param.requires_grad])

    # ------------------------------------------------------------------ places in buckets

    def _make_buckets(self, active: list[Slot]) -> None:
        """Make the buckets anew, for the parameters in `active`."""
        self.reducer = self._make_reducer(active)
        members = {slot.number for slot in active}
        self._unbucketed = [slot for slot in self._slots if slot.number not in members]
        # The first backward only counts arrivals: a bucket whose gradient arrives twice in one
        # backward (a parameter in two reentrant checkpoints) must not leave after the first time.
        self._arrivals: dict[int, int] | None = {} if self.reducer.can_overlap else None

    def _make_reducer(self, slots: Sequence[Slot]) -> Reducer:
        group, divides = self._controller.attached_group(), self._controller.weights.averages
        how = (slots, group, self._cap_bytes, self._signature)
        if self._order is not None:
            return OrderedReducer(*how, order=self._order, divides=divides)
        return Reducer(*how, combine=self._combine, divides=divides)

    def _unfrozen(self) -> list[Slot]:
        """The parameters without a bucket that are trained in this round.

        Within a window a parameter may be unfrozen and frozen again: then it has a gradient.
        """
        return [
            slot
            for slot in self._unbucketed
            if slot.param.requires_grad or slot.param.grad is not None
        ]

    def _reduce_unfrozen(self, first: Contribution) -> tuple[RoundTotals, Contribution]:
        """A second round, for unfrozen parameters; from the next backward on they have buckets.

        Returns:
            The sums over the ranks, and this rank's contribution to them.

        Gradient:
            As of a round of its own, for the parameters that any rank unfroze.

        Collective:
            Every rank: one exchange, and the all-reduces of the new buckets.
        """
        mine = [slot.number for slot in self._unfrozen()]
        numbers = set().union(*self._controller.attached_group().exchange(mine))
        second = self._make_reducer([slot for slot in self._slots if slot.number in numbers])
        contribution = replace(first, faults=list(first.faults), has_unfrozen=False)
        second.start(contribution)
        sums = second.finish(must_read=True)
        assert sums is not None
        gradients = {slot: slot.param.grad for slot in self._slots}
        active = numbers | {slot.number for slot in self.reducer.layout.slots}
        self._make_buckets([slot for slot in self._slots if slot.number in active])
        for slot, gradient in gradients.items():
            slot.set_reduced(gradient)  # a view of the buckets of before
        return sums, contribution

    # ------------------------------------------------------------------ arrivals

    @property
    def needs_on_accumulated(self) -> bool:
        """See `Transport`: a lone bucket leaves only after backward."""
        return self.reducer.can_overlap or bool(self._unbucketed)

    @property
    def on_accumulated(self) -> Callable[[Slot], None] | None:
        """See `Transport`."""
        return self._on_accumulated

    def _count(self, slot: Slot) -> None:
        assert self._arrivals is not None
        self._arrivals[slot.number] = self._arrivals.get(slot.number, 0) + 1
        self.reducer.bucket_order.note_arrival()

    def _end_counting(self) -> None:
        """After a backward: let buckets leave early whose gradients arrive once."""
        if not self._arrivals:
            return
        for bucket in self.reducer.layout.buckets:
            often = any(self._arrivals.get(number, 0) > 1 for number in bucket.numbers)
            bucket.may_leave_early = not often
        self._arrivals = None

    # ------------------------------------------------------------------ backwards

    def open_window(self, kind: str, *, is_first: bool) -> None:
        """See `Transport`: under a shard order a backward has to be that of a shard."""
        if self._order is None:
            was_unfrozen = any(slot.param.requires_grad for slot in self._unbucketed)
            self._was_unfrozen = self._was_unfrozen or was_unfrozen
            return
        if not self._controller.is_paused and self._last_shard is None:
            raise round_error_texts.out_of_order_error(self._controller.place)
        # Unfrozen since the buckets were made: every worker runs the same operator.
        if is_first and any(slot.param.requires_grad for slot in self._unbucketed):
            self._make_buckets([slot for slot in self._slots if slot.param.requires_grad])

    def backward(self, replacement_gradients: Gradients | None) -> AbstractContextManager[None]:
        """See `Transport`: replacements are in ``parameter.grad`` before `finish`."""
        if replacement_gradients is not None:
            self._on_accumulated = None
        return nullcontext()

    # ------------------------------------------------------------------ rounds

    def begin(self, contribution: Contribution, step: int) -> None:
        """See `Transport`.

        Collective:
            As gradients arrive: all-reduces of full buckets, not waited for.
        """
        self.reducer.start(contribution, step)
        if self._last_shard is not None and isinstance(self.reducer, OrderedReducer):
            self.reducer.set_last_shard(self._last_shard, contribution.unpacked_weight)
        if self._sends_early and self.reducer.can_overlap:
            self._on_accumulated = self.reducer.arrive if self._arrivals is None else self._count

    def finish(self, faults: Sequence[Fault]) -> RoundResult:
        """See `Transport`.

        Collective:
            The all-reduces of the remaining buckets.
        """
        self._is_finishing = True
        self.reducer.end_backward()
        if self._wait_for_peers is not None:
            self._wait_for_peers()
        self._on_accumulated = None
        contribution = self.reducer.contribution
        contribution.faults += faults
        self._note_unfrozen(contribution)
        reducer, is_whole = self.reducer, not self._unbucketed
        # A peer may have a gradient of what is frozen by now, from a backward that sent nothing.
        sums = reducer.finish(must_read=self._was_unfrozen and not is_whole)
        used_all = reducer.used_all() and is_whole
        sums_to_judge = [] if sums is None else [(sums, contribution)]
        unread = None
        if sums is None:
            unread = UnreadTotals(reducer.layout.sums_on_device, contribution)
        if contribution.has_unfrozen or (sums is not None and sums.unfrozen):
            sums_to_judge.append(self._reduce_unfrozen(contribution))
        self._end_counting()
        self._is_finishing = False
        return RoundResult(
            took_place=True,
            has_gradients=sums is None or sums.plain + sums.weighted > 0,
            used_all=used_all,
            sums_to_judge=sums_to_judge,
            unread=unread,
            read_together=reducer.reads_are_free,
        )

    def _note_unfrozen(self, contribution: Contribution) -> None:
        unfrozen = [slot.name for slot in self._unfrozen()]
        if unfrozen and self._order is not None and contribution.kind is not None:
            # The shards before this one have left their gradients in the places that there were.
            contribution.faults.append(Fault.of("unfrozen_in_window", unfrozen[:8]))
        else:
            contribution.has_unfrozen = bool(unfrozen)

    def follow(self, contribution: Contribution, step: int, faults: Sequence[Fault]) -> RoundResult:
        """See `Transport`; this rank may not have seen what its peers unfroze."""
        self._was_unfrozen = True
        return super().follow(contribution, step, faults)

    @property
    def is_half_sent(self) -> bool:
        """See `Transport`."""
        return self.reducer.has_launched or self._is_finishing

    def reset(self, *, has_failed: bool) -> None:
        """See `Transport`."""
        self.reducer.abandon()
        self._is_finishing = self._was_unfrozen = False
        self._on_accumulated = None

    def send_late(self) -> None:
        """See `Transport`."""
        self._sends_early = False

    def accept_changes(self) -> None:
        """See `Transport`."""
        for bucket in self.reducer.layout.buckets:
            bucket.reduced_version = version_of(bucket.flat)
            for slot in bucket.kept:
                slot.accept_changes()

    # ------------------------------------------------------------------ shards

    @property
    def ordered_reducer(self) -> OrderedReducer:
        """See `Transport`."""
        assert isinstance(self.reducer, OrderedReducer), "made without a shard order"
        return self.reducer

    def set_order(self, order: ShardOrder) -> None:
        """See `Transport`."""
        self._order = order
        self._make_buckets([slot for slot in self._slots if slot.param.requires_grad])

    @contextmanager
    def last_shard(self, shard: int) -> Iterator[None]:
        """See `Transport`."""
        self._last_shard = shard
        try:
            yield
        finally:
            self._last_shard = None

    def close(self) -> None:
        """See `Transport`."""
        self.reducer.close()
