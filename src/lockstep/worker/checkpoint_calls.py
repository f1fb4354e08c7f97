# SPDX-License-Identifier: Apache-2.0
"""What the driver asks workers for, to save and to load a state of which each has a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep import checkpoint
from lockstep.worker.remote_method import Communication, OnFailure, remote_method

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.checkpoint import StoredTensor
    from lockstep.worker.worker import Worker


@remote_method(Communication.RUN_GROUP, OnFailure.REPEAT)
def hold_part(worker: Worker) -> int:
    """See `CheckpointPart.hold`."""
    return worker.snapshots.part.hold()


@remote_method(Communication.NONE, OnFailure.REPEAT)
def can_read(worker: Worker, stored: StoredTensor) -> bool:
    """Whether this rank's host sees the checkpoint directory that `stored` is in."""
    return checkpoint.is_here(stored)


@remote_method(Communication.NONE, OnFailure.REPEAT)
def receive_state(worker: Worker, state: Mapping[str, Any]) -> None:
    """Keep what this rank has of a checkpoint that its host does not see, for `apply_state`."""
    worker.incoming = state
