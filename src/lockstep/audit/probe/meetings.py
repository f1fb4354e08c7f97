# SPDX-License-Identifier: Apache-2.0
"""Where replicas meet between the steps that are looked at in detail, as after a long local round.

A program that averages its replicas every hundred steps does so where nobody looks: the steps that
are written down become rarer. So messages are counted in every step. Where ranks have told one
another more since the last step than they usually do, the weights that the step begins with are
written down. A broadcast makes ranks equal and averages nothing, so it is no such message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep.audit.fingerprint import take

if TYPE_CHECKING:
    import torch

    from lockstep.audit.probe.probe import Probe, Watched

_MOST: Final = 8
"""So many are written down of an optimizer: each is a look at all weights."""


def note_message(probe: Probe, op: str, tensor: torch.Tensor | None) -> None:
    """Count a message of more than one number; those of a backward are gradients."""
    if tensor is None or probe.in_backward or tensor.numel() < 2:
        return
    if op == "broadcast":
        probe.broadcasts += 1
    else:
        probe.messages += 1


def before_step(probe: Probe, watched: Watched) -> None:
    """Before a step: write its weights down, if it comes after more messages than the others."""
    messages = probe.messages - watched.messages_before
    is_more = watched.fewest_messages is not None and messages > watched.fewest_messages
    met = watched.track.meetings
    if is_more and probe.broadcasts == watched.broadcasts_before and len(met) < _MOST:
        entry = take(watched.parameters, [0] * len(watched.parameters), norms=False)
        met.append([watched.track.count, *map(int, entry.hashes)])


def after_step(probe: Probe, watched: Watched) -> None:
    """After a step: begin to count."""
    messages = probe.messages - watched.messages_before
    fewest = watched.fewest_messages
    watched.fewest_messages = messages if fewest is None else min(fewest, messages)
    watched.messages_before, watched.broadcasts_before = probe.messages, probe.broadcasts
