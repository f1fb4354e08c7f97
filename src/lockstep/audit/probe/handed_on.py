# SPDX-License-Identifier: Apache-2.0
"""Rows that reach other ranks by broadcasts in turn, swapped, or pickled: without a graph."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from lockstep.audit.probe.batches import tensors_in
from lockstep.audit.probe.gathers import note_exchange, taint

if TYPE_CHECKING:
    from lockstep.audit.facts import Collective
    from lockstep.audit.probe.probe import Probe

OBJECTS: Final = "all_gather_object"
SWAPS: Final = ("all_to_all", "all_to_all_single")
_MOST: Final = 64
"""Between two steps, the last ones; of one message, the first ones."""


def note_broadcast(
    probe: Probe, call: Collective, tensor: torch.Tensor, given: dict[str, Any]
) -> None:
    """Ranks that send rows with a gradient, and receive those of others: a gather, in turn.

    One that only receives is the second stage of something, which sends gradients back itself.
    """
    source = given.get("src")
    if len(call.group) < 2 or call.in_backward or not tensor.is_floating_point() or source is None:
        return
    if source != dist.get_rank():
        probe.received.append((call, weakref.ref(tensor)))
        del probe.received[:-_MOST]
    elif tensor.grad_fn is not None:
        probe.has_sent = True
    if probe.has_sent:
        for known, reference in probe.received:
            received = reference()
            if received is not None:
                taint(probe, known, received, [received], None)
        probe.received.clear()


def note_swap(probe: Probe, call: Collective, given: dict[str, Any]) -> None:
    """Each rank sent others some of its rows, and received some of theirs."""
    received = given.get("output", given.get("output_tensor_list"))
    sent = given.get("input", given.get("input_tensor_list"))
    if len(call.group) > 1:
        is_there = not given.get("async_op")
        note_exchange(probe, call, _numbers_in(sent), _numbers_in(received), is_there=is_there)


def _numbers_in(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value, _MOST) if tensor.is_floating_point()]


def note_objects(probe: Probe, call: Collective, given: dict[str, Any]) -> None:
    """What ``all_gather_object`` was given: tensors with a gradient, or a number."""
    received, sent = given.get("object_list"), given.get("obj")
    if not isinstance(received, list) or len(call.group) < 2 or call.in_backward:
        return
    if isinstance(sent, float) and all(isinstance(number, float) for number in received):
        call.before, call.after = sent, sum(received)
    own = next((tensor for tensor in tensors_in(sent, _MOST) if tensor.grad_fn is not None), None)
    # They arrive as leaves that want a gradient of their own, which nobody reads.
    arrived = [tensor.detach() for tensor in tensors_in(received, _MOST)]
    if own is not None and arrived:
        taint(probe, call, own, arrived, None)
