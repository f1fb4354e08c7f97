# SPDX-License-Identifier: Apache-2.0
"""`write_snapshot`: writes a copy of the run's state to a file, or to a directory in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep import checkpoint
from lockstep.errors import CheckpointWriteError
from lockstep.worker import add_every_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.checkpoint import WrittenPart
    from lockstep.worker import Snapshot

    WriteParts = Callable[[int, str], list[WrittenPart] | None]
    """See `Engine.write_parts`."""


def write_snapshot(
    snapshot: Snapshot, path: str, *, in_shards: bool, write_parts: WriteParts
) -> str:
    """Write `snapshot` to `path`.

    Args:
        snapshot: the state, or the step of which each rank holds its part.
        path: of a file, or of a directory.
        in_shards: write a directory.
        write_parts: lets each rank write its part.

    Raises:
        CheckpointError: see `lockstep.checkpoint.write`.
        CheckpointWriteError: a part is gone, because its worker was lost or has gone on.
    """
    if snapshot.state is not None:
        write = checkpoint.write_directory if in_shards else checkpoint.write
        return write(path, snapshot.state)
    with checkpoint.publish_directory(path) as folder:
        parts = write_parts(snapshot.step, folder)
        if parts is None:
            raise CheckpointWriteError(
                "a worker does not hold its part of this checkpoint any more",
                where=path,
                got=f"step {snapshot.step}",
                cause="the run went back, or a worker was lost, before the part was written",
                fix="save again; in checkpoint_dir the next one that is due will be whole",
            )
        checkpoint.finish_directory(folder, parts, _state_of(parts))
    return path


def _state_of(parts: Sequence[WrittenPart]) -> dict[str, Any]:
    """The state of the run, as `TorchTrainer.state_dict` has it, from those of the ranks."""
    return add_every_rank(
        parts[0].state, [{key: part.state[key] for key in parts[0].own} for part in parts]
    )
