# SPDX-License-Identifier: Apache-2.0
"""Finds the steps before which replicas were averaged, where no step is recorded in detail.

After a program's first steps few are recorded, and one that averages its weights every hundred
steps, or once when all are done, may do so between them. So collectives are counted in every step.
Before a step that follows more collectives than the quietest one, and in the end, the probe hashes
the weights. Broadcasts do not count: they make replicas equal without averaging them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep.audit.fingerprint import take

if TYPE_CHECKING:
    import torch

    from lockstep.audit.probe.probe import Probe, Watched

_MOST: Final = 8
"""Steps whose weights are hashed, per optimizer: each hash reads all weights."""


def note_message(probe: Probe, op: str, tensor: torch.Tensor | None) -> None:
    """Count a collective of more than one number; those within a backward are of gradients."""
    if tensor is None or probe.in_backward or tensor.numel() < 2:
        return
    if op == "broadcast":
        probe.broadcasts += 1
    else:
        probe.messages += 1


def before_step(probe: Probe, watched: Watched) -> None:
    """Before a step, or an end, that follows more collectives than others did: hash the weights."""
    messages = probe.messages - watched.messages_before
    is_more = watched.fewest_messages is not None and messages > watched.fewest_messages
    met = watched.track.meetings
    if is_more and probe.broadcasts == watched.broadcasts_before and len(met) < _MOST:
        entry = take(watched.parameters, [0] * len(watched.parameters), norms=False)
        met.append([watched.track.count, *map(int, entry.hashes)])


def after_step(probe: Probe, watched: Watched) -> None:
    """Update the smallest number of collectives between two steps, and count anew."""
    messages = probe.messages - watched.messages_before
    fewest = watched.fewest_messages
    watched.fewest_messages = messages if fewest is None else min(fewest, messages)
    watched.messages_before, watched.broadcasts_before = probe.messages, probe.broadcasts
