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
    from lockstep.sync.transport_protocol import Gradients, Transport


def take_gradients(slots: Sequence[Slot], transport: Transport) -> Gradients:
    """Take the gradients out of ``parameter.grad``, in memory that the backward does not write."""
    taken: Gradients = {}
    for slot in slots:
        if slot.param.grad is not None:
            taken[slot] = slot.param.grad
            slot.param.grad = None
    return transport.own_memory(taken)


def return_gradients(
    taken: Gradients, slots: Sequence[Slot], transport: Transport, *, is_borrowed: bool
) -> None:
    """Put gradients back after a backward of weight zero; what it used gets zeros.

    Args:
        is_borrowed: the batch is another rank's (see `BatchWeights.is_borrowed`), and gives no
            zeros.
    """
    already_reduced = transport.already_reduced
    for slot in slots:
        if slot in already_reduced:
            continue
        is_used = slot.param.grad is not None and not is_borrowed
        zeros = torch.zeros_like(slot.param) if is_used and slot not in taken else None
        slot.param.grad = taken.get(slot, zeros)
