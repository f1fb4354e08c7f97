# SPDX-License-Identifier: Apache-2.0
"""What the driver asks workers for, to save and to load a state of which each has a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep import checkpoint
from lockstep.checkpoint import StoredTensor
from lockstep.errors import CheckpointError
from lockstep.tensor_tree import leaves_of
from lockstep.worker.remote_method import Communication, OnFailure, remote_method

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.worker.worker import Worker


@remote_method(Communication.RUN_GROUP, OnFailure.REPEAT)
def hold_part(worker: Worker) -> int:
    """See `CheckpointPart.hold`."""
    return worker.snapshots.part.hold()


@remote_method(Communication.NONE, OnFailure.REPEAT)
def begin_load(worker: Worker, stored: StoredTensor | None) -> tuple[int, int] | None:
    """Forget what an earlier load or save has left, and copies of steps that the run leaves.

    Args:
        stored: a tensor of the directory that is loaded; None if it is none.

    Returns:
        None if this rank needs nothing from the driver; else its rank among the ranks that share
        tensors out, and their number: its host does not see the directory.
    """
    worker.incoming = None
    worker.snapshots.drop()
    is_seen = stored is None or checkpoint.is_here(stored)
    return None if is_seen else worker.place_in_shards


@remote_method(Communication.NONE, OnFailure.REPEAT)
def receive_state(worker: Worker, state: Mapping[str, Any]) -> None:
    """Keep what this rank has of a checkpoint that its host does not see, for `apply_state`."""
    worker.incoming = state


@remote_method(Communication.NONE, OnFailure.RAISE)
def read_rows(
    worker: Worker, rank: int, size: int, state: Mapping[str, Any]
) -> tuple[int, int] | None:
    """Read, for `memory_recovery.go_back`, what this worker will have as rank `rank` of `size`.

    Not while the group forms: there a rank that reads for long would be taken for one that hangs.

    Args:
        state: a checkpoint as `open_checkpoint` returns it, made by the driver: a host with another
            directory of the same name must not read that.

    Returns:
        As `begin_load`.

    Raises:
        CheckpointError: a file is damaged, or cannot be read.
    """
    worker.incoming = None
    place = worker.place_among(rank, size)
    stored = next((leaf for leaf in leaves_of(state) if isinstance(leaf, StoredTensor)), None)
    try:
        if stored is not None and not checkpoint.is_here(stored):
            return place
        worker.incoming = checkpoint.read_own_tensors(state, *place)
    except OSError as error:
        raise CheckpointError(
            "a checkpoint cannot be read", where=error.filename, cause=str(error)
        ) from error
    return None
