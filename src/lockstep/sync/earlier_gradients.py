# SPDX-License-Identifier: Apache-2.0
"""`EarlierGradients`: gradients that earlier rounds have left, set aside while a window is open.

A parameter's gradient is the sum of the gradients of several backwards. A gradient that an earlier
round has reduced is the same on every rank already; reduced again, it would be averaged a second
time. So it is taken out of ``parameter.grad`` when the window opens, and added to the gradient of
the window's own round. The ranks compare the changes that their programs made to it meanwhile: a
sum of one rank's clipped gradient and another rank's unclipped one would be the gradient of no
objective.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from lockstep.sync.tensor_bits import sum_of_bits
from lockstep.tensor_copies import is_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from lockstep.sync.autograd_grad_watch import AutogradGradWatch
    from lockstep.sync.backward_listener import BackwardListener
    from lockstep.sync.buckets import Slot
    from lockstep.sync.transport_protocol import Gradients


class EarlierGradients:
    """The gradients that existed when a window opened; none before `set_aside`.

    Args:
        slots: the synchronised parameters.

    Attributes:
        by_slot: those gradients.
        number: a small integer, the same on all ranks if the same parameters had a gradient, and
            the program has changed or replaced the same ones since their round, to the same bits.
        is_edited: the program has changed or replaced some of them.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self.by_slot: Gradients = {}
        self.number = 0
        self.is_edited = False

    def set_aside(self, own_memory: Callable[[Gradients], Gradients]) -> list[Slot]:
        """Take the gradients out of ``parameter.grad``, which becomes None.

        Args:
            own_memory: see `Transport.own_memory`.

        Returns:
            The parameters whose gradient the program has not zeroed.
        """
        changed: list[tuple[int, int]] = []
        for slot in self._slots:
            grad = slot.param.grad
            if grad is not None:
                if not slot.is_untouched:
                    # Rows in shards are other bits on each rank: what they have in common is which.
                    bits = 1 if is_shard(grad) else sum_of_bits(grad)
                    changed.append((slot.number, bits))
                self.by_slot[slot] = grad
                slot.param.grad = None
        if not self.by_slot:
            return []
        which = [slot.number for slot in self.by_slot]
        self.number = zlib.crc32(repr((which, changed)).encode()) % 4093 + 1
        self.is_edited = bool(changed)
        zeroed = {number for number, bits in changed if not bits}
        held = [slot for slot in self.by_slot if slot.number not in zeroed]
        self.by_slot = own_memory(self.by_slot)
        return held

    def put_back(self) -> None:
        """After a refused round: put the earlier gradients back, and drop those of the round."""
        for slot in self._slots:
            self._put_back(slot)

    def add_to_partial(self) -> None:
        """After a backward that raised: add its partial, local gradients to the earlier ones."""
        for slot in self._slots:
            if slot.param.grad is None:
                self._put_back(slot)
            else:
                self.add_to(slot, slot.param.grad)

    def _put_back(self, slot: Slot) -> None:
        earlier = self.by_slot.get(slot)
        slot.param.grad = earlier
        if not self.is_edited:
            slot.set_reduced(earlier)

    def add_to(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Set ``parameter.grad`` to the sum of the earlier gradient and `gradient`, if any."""
        earlier = self.by_slot.get(slot)
        if earlier is None:
            slot.param.grad = gradient
        else:
            with torch.no_grad():
                slot.param.grad = earlier if gradient is None else earlier.add_(gradient)

    def add_to_round(
        self,
        listener: BackwardListener,
        grad_watch: AutogradGradWatch,
        unreduced: Collection[Slot],
        new_round: int | None,
    ) -> None:
        """After a round: add its gradients to those of the earlier rounds.

        Args:
            listener: runs the user's hooks, which a reduced gradient passes on its way.
            grad_watch: samples the gradients that a round has left.
            unreduced: parameters whose gradient is still this rank's own.
            new_round: the round's number; None if the ranks have not met in it.
        """
        hooked: Gradients = {}
        if listener.hooked:
            for slot in reversed(self._slots):
                grad = slot.param.grad
                waits = slot.number in listener.hooked and slot.param.requires_grad
                if waits and grad is not None and slot not in unreduced:
                    hooked[slot] = grad
        for slot in self.by_slot:
            if slot in hooked:
                continue
            is_own = slot.param.grad is not None and slot in unreduced
            self.add_to(slot, slot.param.grad)
            if is_own:
                slot.mark_local()
            else:
                self._mark_reduced(slot, new_round)
        if new_round is not None or not self.is_edited:
            for slot in self.by_slot:
                slot.accept_changes()  # views of one tensor have one version together
        grad_watch.remember_gradients()
        if hooked:
            self._apply_user_hooks(hooked, listener, grad_watch, new_round)

    def _mark_reduced(self, slot: Slot, new_round: int | None) -> None:
        """Note that ``parameter.grad`` is the same on every rank, as far as ranks have compared."""
        if new_round is not None or not self.is_edited:
            slot.set_reduced(slot.param.grad)
        if new_round is not None:
            slot.last_round = new_round

    def _apply_user_hooks(
        self,
        hooked: Gradients,
        listener: BackwardListener,
        grad_watch: AutogradGradWatch,
        new_round: int | None,
    ) -> None:
        """Let reduced gradients pass the user's hooks on their way into ``parameter.grad``."""
        for slot in hooked:
            slot.param.grad = self.by_slot.get(slot)

        def write_gradient(slot: Slot, reduced: torch.Tensor) -> None:
            self.add_to(slot, reduced)
            if slot in self.by_slot:
                self._mark_reduced(slot, new_round)
            grad_watch.remember(slot)

        try:
            listener.pass_user_hooks(hooked, write_gradient)
        except BaseException:
            for slot, reduced in hooked.items():
                self.add_to(slot, reduced)
            raise
