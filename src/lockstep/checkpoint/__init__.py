# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: written whole or not at all, verified when read, and read without running code.

- `plain_values`: `plain_state` converts a state to the types that a checkpoint may hold.
- `file_format`: a checkpoint in one file, which is a torch file with lockstep's mark at its end.
- `file_integrity`: the checksums that together cover every byte of that file.
- `dcp_directory`: a checkpoint as a directory, whose tensors any program can read in shards.
- `atomic_write`: replaces a file's content in one step.
- `conversion`: makes a file of a directory, and back.
- `temporary_paths`: temporary files and folders, and what killed writers have left of them.
- `rotation`: keeps the last few checkpoints of a run, and finds the newest good one.
"""

from __future__ import annotations

import os
from typing import Any

from lockstep.checkpoint.atomic_write import publish as publish
from lockstep.checkpoint.conversion import convert as convert
from lockstep.checkpoint.dcp_directory import StoredTensor as StoredTensor
from lockstep.checkpoint.dcp_directory import WrittenPart as WrittenPart
from lockstep.checkpoint.dcp_directory import finish_directory as finish_directory
from lockstep.checkpoint.dcp_directory import is_checkpoint_directory, open_directory
from lockstep.checkpoint.dcp_directory import is_here as is_here
from lockstep.checkpoint.dcp_directory import publish_directory as publish_directory
from lockstep.checkpoint.dcp_directory import read_own_tensors as read_own_tensors
from lockstep.checkpoint.dcp_directory import write_directory as write_directory
from lockstep.checkpoint.dcp_directory import write_part as write_part
from lockstep.checkpoint.file_format import read_file
from lockstep.checkpoint.file_format import serialise as serialise
from lockstep.checkpoint.file_format import write as write
from lockstep.checkpoint.plain_values import plain_state as plain_state
from lockstep.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["convert", "plain_state", "publish", "read", "serialise", "write", "write_directory"]


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a state that `write` saved, after every byte has been checked; tensors are on the CPU.

    Raises:
        CheckpointNotFoundError: there is no such file (also a FileNotFoundError).
        CheckpointError: the file is empty, truncated, damaged, foreign, written by a newer
            version, or a directory of another program's, or holds what only code could rebuild.
        MemoryError, RuntimeError: the file is good, and the host has too little memory for it.
    """
    state: dict[str, Any] = read_own_tensors(open_checkpoint(path))
    return state


def open_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """As `read`, with a `StoredTensor` in the place of each tensor in a directory.

    Each rank then reads its rows by `read_own_tensors`.
    """
    try:
        if is_checkpoint_directory(os.fspath(path)):
            return open_directory(os.fspath(path))
        return read_file(os.fspath(path))
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            "there is no checkpoint", where=os.path.abspath(path), fix="check the path"
        ) from error
    except OSError as error:
        raise CheckpointError(
            "the checkpoint cannot be opened or read",
            where=os.fspath(path),
            expected="a file that this process may read",
            got="a directory" if isinstance(error, IsADirectoryError) else str(error),
            fix="give the path of the file that `save` returned",
        ) from error
