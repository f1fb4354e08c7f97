# SPDX-License-Identifier: Apache-2.0
"""`AccumulationWindow`: the backwards of one rank since the last round of reduction."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lockstep._torch_compat import version_of
from lockstep.sync import round_error_texts
from lockstep.sync.round_contribution import PLAIN, WEIGHTED, Contribution, Fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.sync.buckets import Slot
    from lockstep.sync.earlier_gradients import EarlierGradients
    from lockstep.sync.weighted_loss_scale import BatchWeights

_RememberedGradient = tuple[weakref.ref[torch.Tensor], int]
"""The gradient in ``parameter.grad`` when a backward ended, and its version."""


def _remember(grad: torch.Tensor | None) -> _RememberedGradient | None:
    """Remember `grad` and its version; None if there is no gradient."""
    # A weak reference: the tensor is the user's to free, and a freed tensor's id is soon
    # another tensor's.
    return None if grad is None else (weakref.ref(grad), version_of(grad))


def _is_unchanged(left: _RememberedGradient | None, grad: torch.Tensor | None) -> bool:
    """Whether `grad` is the remembered tensor, with the same version."""
    if left is None or grad is None:
        return left is None and grad is None
    return left[0]() is grad and left[1] == version_of(grad)


@dataclass
class AccumulationWindow:
    """The backwards since the last round, on this rank.

    Attributes:
        kind: PLAIN, WEIGHTED, or None before the first.
        weight: the sum of the weighted backwards' weights, in multiples of `BatchWeights.unit`.
        packed_weight: the same of those whose gradients were packed as those of shards.
        delivered: the weight of the batch that the first plain backward was for; None: no weight
            was delivered, and every rank's counts as 1.
        faults: reasons for all ranks to refuse the round.
        hidden: the gradients that `hide_gradients` has taken out of ``parameter.grad``.
        num_backwards: how many there are.
    """

    kind: str | None = None
    weight: float = 0.0
    packed_weight: float = 0.0
    delivered: float | None = None
    faults: list[Fault] = field(default_factory=list)
    hidden: list[torch.Tensor | None] | None = None
    num_backwards: int = 0
    _remembered: list[_RememberedGradient | None] | None = None

    def enter(self, kind: str, weights: BatchWeights, where: str) -> None:
        """Note a backward of `kind`, and the weight of its batch.

        Args:
            weights: counts the backward, and says what its batch weighs.
            where: for the error.

        Raises:
            MixedWeightsError: the window holds backwards of the other kind.
            WeightError: the program has given the batch a bad weight.
        """
        weights.num_backwards += 1
        self.num_backwards += 1
        if kind == WEIGHTED:
            self._enter(WEIGHTED, where)
        elif weights.averages:
            self._enter_plain(weights.delivered, where)
        else:
            self._enter_sum(weights.delivered, where)

    def _enter(self, kind: str, where: str) -> bool:
        """Note a backward of `kind`. True if it is the first of the window."""
        if self.kind is None:
            self.kind = kind
            return True
        if self.kind != kind:
            got = f"a {self.kind} backward, then a {kind} one"
            raise round_error_texts.fault_error("mixed", got, where=where)
        return False

    def _enter_plain(self, delivered: float | None, where: str) -> None:
        """Note a plain backward of a batch whose weight is `delivered`."""
        if self._enter(PLAIN, where):
            self.delivered = delivered
        elif self.delivered != delivered:
            # `parameter.grad` holds the sum already, so the batches can no longer be weighted one
            # by one. This rank reports the fault and does not raise: on the other ranks the weights
            # may have stayed the same.
            got = f"the delivered weight changed from {self.delivered} to {delivered}"
            self.faults.append(Fault("unequal_batches", got))

    def _enter_sum(self, delivered: float | None, where: str) -> None:
        """Note a plain backward whose loss is a sum; it counts unless `delivered` is zero."""
        counts = None if delivered is None else float(delivered > 0)
        if self._enter(WEIGHTED, where):
            self.delivered = counts
        elif self.delivered != counts:
            got = f"whether the batch counts changed from {self.delivered} to {counts}"
            self.faults.append(Fault("empty_batch_in_window", got))
        self.weight += 1.0 if counts is None else counts

    @property
    def total_weight(self) -> float:
        return self.packed_weight + self.weight

    def pack_weight(self) -> float:
        """The weight of the backwards since the last call.

        Summed from zero: as a difference of sums its last bit would depend on the shards before.
        """
        weight, self.weight = self.weight, 0.0
        self.packed_weight += weight
        return weight

    def contribution(self, weights: BatchWeights, earlier: EarlierGradients) -> Contribution:
        """This rank's part of the round that closes the window."""
        made = Contribution(
            kind=self.kind,
            faults=self.faults,
            earlier=earlier.number,
            is_edited=earlier.is_edited,
            is_borrowed=self.delivered == 0.0,
            num_backwards=self.num_backwards,
        )
        if self.kind == WEIGHTED:
            made.weight, made.unpacked_weight = self.total_weight, self.weight
        elif self.kind == PLAIN:
            made.weight = (1.0 if self.delivered is None else self.delivered) / weights.unit(PLAIN)
            made.scale = made.weight
            made.is_delivered = self.delivered is not None
        return made

    def remember_gradients(self, slots: Sequence[Slot]) -> None:
        """After a backward of the window: remember the tensor in each ``parameter.grad``."""
        self._remembered = [_remember(slot.param.grad) for slot in slots]

    def hide_gradients(self, slots: Sequence[Slot]) -> None:
        """Take the window's gradients out of ``parameter.grad``, until `check_gradients`."""
        self.hidden = [slot.param.grad for slot in slots]
        for slot in slots:
            slot.param.grad = None

    def _show_gradients(self, slots: Sequence[Slot]) -> None:
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            return
        if any(slot.param.grad is not None for slot in slots):
            self.faults.append(Fault("edited_in_window"))
        for slot, grad in zip(slots, hidden, strict=True):
            slot.param.grad = grad

    def check_gradients(self, slots: Sequence[Slot], earlier: Iterable[Slot]) -> bool:
        """Before the window's next backward: look at what the program did to its gradients.

        Args:
            earlier: the parameters whose gradients of earlier rounds are set aside.

        Returns:
            Whether it zeroed them: it gave the window up, with its weights. Other changes are a
            fault: they cannot be told from the sum of the window's backwards, and no rank knows
            their weight.
        """
        self._show_gradients(slots)
        if self._has_unchanged_gradients(slots):
            return False
        grads = [slot.param.grad for slot in slots if slot.param.grad is not None]
        # The program cannot zero gradients that were set aside: it may have meant to.
        is_out_of_sight = not self._has_gradients_of(earlier)
        if is_out_of_sight or any(bool(grad.any()) for grad in grads):
            self.faults.append(Fault("edited_in_window"))
            return False
        return True

    def _has_unchanged_gradients(self, slots: Sequence[Slot]) -> bool:
        """Whether each ``parameter.grad`` is the remembered tensor, in the same version."""
        if self._remembered is None:
            return True
        return all(map(_is_unchanged, self._remembered, (slot.param.grad for slot in slots)))

    def _has_gradients_of(self, slots: Iterable[Slot]) -> bool:
        """Whether the window's backwards have left a gradient in each of these parameters."""
        return all(
            self._remembered is None or self._remembered[slot.number] is not None for slot in slots
        )
