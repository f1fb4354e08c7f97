# SPDX-License-Identifier: Apache-2.0
"""The gradients around a backward of weight zero, of which no value may stay.

Scaling its gradients by zero would keep NaN. So the gradients of before are taken out of
``parameter.grad``, and put back when the backward has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.sync.buckets import Slot
    from lockstep.sync.local_gradients import LocalGradients
    from lockstep.sync.transport_protocol import Gradients, Transport


class GradientsBefore:
    """The gradients of before a backward of weight zero.

    Args:
        slots: the synchronised parameters.
        local: the gradients of the others.
        transport: keeps the gradients in memory that the backward does not write.

    Attributes:
        by_slot: those of the synchronised parameters.
    """

    def __init__(self, slots: Sequence[Slot], local: LocalGradients, transport: Transport) -> None:
        self._slots, self._local, self._transport = slots, local, transport
        taken: Gradients = {}
        for slot in slots:
            if slot.param.grad is not None:
                taken[slot] = slot.param.grad
                slot.param.grad = None
        self.by_slot = transport.own_memory(taken)
        self._of_local = local.take()

    def put_back(self) -> None:
        """Put the gradients back after a backward that has raised."""
        for slot in self._slots:
            slot.param.grad = self.by_slot.get(slot)
        self._local.put_back(self._of_local, with_zeros=False)

    def put_back_with_zeros(self, *, is_borrowed: bool) -> None:
        """Put the gradients back after the backward; what it used and had none gets zeros.

        Args:
            is_borrowed: the batch is another rank's (see `BatchWeights.is_borrowed`), and gives no
                zeros.
        """
        already_reduced = self._transport.already_reduced
        for slot in self._slots:
            if slot in already_reduced:
                continue
            is_used = slot.param.grad is not None and not is_borrowed
            has_none = is_used and slot not in self.by_slot
            zeros = torch.zeros_like(slot.param) if has_none else None
            slot.param.grad = self.by_slot.get(slot, zeros)
        self._local.put_back(self._of_local, with_zeros=not is_borrowed)
