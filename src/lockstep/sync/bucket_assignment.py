# SPDX-License-Identifier: Apache-2.0
"""Which parameters have a place in a bucket, and when their buckets may leave.

A parameter that is frozen when the buckets are made waits outside. When any rank unfreezes it,
all ranks give it a place: they learn of it from the sums of a round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lockstep.sync.ordered_reducer import OrderedReducer
from lockstep.sync.reducer import Contribution, Reducer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.group import Group
    from lockstep.sync.buckets import Slot, Sums
    from lockstep.sync.shard_tree_sum import ShardOrder


@dataclass(frozen=True)
class ReducerFactory:
    """How reducers are made; see `Reducer` and `OrderedReducer`."""

    cap_bytes: int
    signature: int
    divides: bool
    order: ShardOrder | None

    def reducer(self, group: Group, slots: Sequence[Slot]) -> Reducer:
        cap, signature, divides = self.cap_bytes, self.signature, self.divides
        if self.order is None:
            return Reducer(slots, group, cap, signature=signature, divides=divides)
        return OrderedReducer(slots, group, cap, self.order, signature, divides=divides)


class BucketAssignment:
    """The parameters in buckets and those outside.

    Attributes:
        reducer: of those that are in buckets.
    """

    def __init__(self, slots: Sequence[Slot], group: Group, making: ReducerFactory) -> None:
        self._slots = slots
        self._making = making
        self.admit_unfrozen(group)

    def admit_unfrozen(self, group: Group) -> None:
        """Make the buckets anew, for all that requires a gradient now."""
        self._build(group, [slot for slot in self._slots if slot.param.requires_grad])

    def _build(self, group: Group, active: list[Slot]) -> None:
        self.reducer = self._making.reducer(group, active)
        members = {slot.number for slot in active}
        self._outside = [slot for slot in self._slots if slot.number not in members]
        # No overlap in the first backward: what arrives twice in one backward (a parameter in
        # two reentrant checkpoints) must not leave after the first time, so look first.
        self._arrivals: dict[int, int] | None = {} if self.reducer.can_overlap else None

    @property
    def is_whole(self) -> bool:
        """Every parameter is in a bucket."""
        return not self._outside

    @property
    def has_unfrozen(self) -> bool:
        """A parameter outside requires a gradient now."""
        return any(slot.param.requires_grad for slot in self._outside)

    def thaw(self, group: Group, first: Contribution) -> tuple[Sums, Contribution]:
        """A second round for what was unfrozen; from the next backward on it has its bucket.

        Returns:
            What the ranks brought to it, to be judged, and what this one did.

        Gradient:
            As of a round of its own, for what any rank unfroze.

        Collective:
            Every rank: one exchange, and the all-reduces of the new buckets.
        """
        mine = [slot.number for slot in self._outside if slot.param.requires_grad]
        numbers = set().union(*group.exchange(mine))
        second = self._making.reducer(group, [s for s in self._slots if s.number in numbers])
        contribution = replace(first, faults=list(first.faults), thaws=False)
        second.start(contribution)
        sums = second.finish(must_read=True)
        assert sums is not None
        gradients = {slot: slot.param.grad for slot in self._slots}
        active = numbers | {slot.number for slot in self.reducer.layout.slots}
        self._build(group, [slot for slot in self._slots if slot.number in active])
        for slot, gradient in gradients.items():
            slot.deliver(gradient)  # a view of the buckets of before
        return sums, contribution

    def listener(self) -> Callable[[Slot], None] | None:
        """Who has to hear of a gradient that arrives; None if nothing can leave before the end."""
        if not self.reducer.can_overlap:
            return None
        return self.reducer.arrive if self._arrivals is None else self._learn

    def _learn(self, slot: Slot) -> None:
        assert self._arrivals is not None
        self._arrivals[slot.number] = self._arrivals.get(slot.number, 0) + 1

    def finish_learning(self) -> None:
        """A backward is over: from now on buckets whose gradients come once may leave early."""
        if not self._arrivals:
            return
        for bucket in self.reducer.layout.buckets:
            often = any(self._arrivals.get(number, 0) > 1 for number in bucket.numbers)
            bucket.may_leave_early = not often
        self._arrivals = None
