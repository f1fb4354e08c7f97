# SPDX-License-Identifier: Apache-2.0
"""`convert`: makes a file of a checkpoint directory, and a directory of a file."""

from __future__ import annotations

import os
import tempfile

import torch

from lockstep.checkpoint.dcp_directory import (
    is_checkpoint_directory,
    open_directory,
    read_own_tensors,
    write_directory,
)
from lockstep.checkpoint.file_format import read_file, write


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> str:
    """Write the checkpoint `source`, a directory, as a file; or a file as a directory.

    A directory need not fit into memory: its tensors are read into temporary files beside `target`,
    which the operating system keeps in memory as far as there is room.

    Returns:
        `target` as a string.

    Raises:
        CheckpointError: `source` is damaged, or no checkpoint.
        CheckpointWriteError: `target` could not be written (also an OSError).
    """
    path = os.fspath(source)
    if not is_checkpoint_directory(path):
        return write_directory(target, read_file(path))
    folder = os.path.dirname(os.path.realpath(target))
    os.makedirs(folder, exist_ok=True)

    def empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = shape.numel() * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # The name is gone at once, and the file with its last user.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".lockstep-") as file:
            memory = torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
        return memory.view(dtype).view(shape)

    return write(target, read_own_tensors(open_directory(path), empty=empty))
