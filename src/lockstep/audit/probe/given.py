# SPDX-License-Identifier: Apache-2.0
"""A gradient's elements as a program hands them to an all_reduce of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.audit.fingerprint import take
from lockstep.audit.probe.optimizers import CLOSELY

if TYPE_CHECKING:
    import torch

    from lockstep.audit.ledger import Collective
    from lockstep.audit.probe.probe import Probe


def note_given(probe: Probe, call: Collective, tensor: torch.Tensor, param: torch.Tensor) -> None:
    """Keep those of its elements that are kept of the gradient after backward, in first steps."""
    for watched in probe.optimizers.values():
        count = watched.counted.get(id(param), 0)
        if count and not tensor.is_sparse and watched.track.count < CLOSELY:
            call.given = take([tensor], [count], norms=False).samples.tolist()
            return
