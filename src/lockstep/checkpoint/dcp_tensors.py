# SPDX-License-Identifier: Apache-2.0
"""Writes and reads tensors, or a rank's rows of them, in torch's distributed checkpoint format.

Each rank writes one file, and no rank waits for another: which rows a rank has follows from the
rows themselves (`LocalRows`). torch's planners decide what lies where in the files, torch's writer
and reader do the rest. Rejected: ``torch.distributed.checkpoint.save``, which plans by collectives,
so that a checkpoint could not be written while training communicates.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import pickle
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lockstep.errors import CheckpointError
from lockstep.local_rows import LocalRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.checkpoint.planner import ReadItem
    from torch.distributed.checkpoint.storage import WriteResult

    Tensors = Mapping[str, torch.Tensor | LocalRows]

METADATA: Final = ".metadata"

# The classes of torch's index (`.metadata`) of a distributed checkpoint of tensors; unpickling
# resolves no other name. Rejected: allowing modules as a whole, because a module's imports (`os`)
# are attributes of it. `BytesStorageMetadata` is missing: torch unpickles such an entry's content.
_ALLOWED_GLOBALS: Final = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "StorageMeta"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath"},  # Python 3.13
}


class WrittenTensors(NamedTuple):
    """What one rank has written: torch's plan of it, and where each item lies."""

    plan: SavePlan
    results: list[WriteResult]

    @property
    def files(self) -> set[str]:
        """The names of the files."""
        return {result.storage_data.relative_path for result in self.results}


def write_tensors(folder: str, tensors: Tensors, rank: int) -> WrittenTensors:
    """Write a rank's tensors into its own file in `folder`, and that to the disk.

    Args:
        tensors: by name; two ranks may have rows of one name, but not one whole tensor.
        rank: the rank, which is in the file's name.
    """
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    plan = SavePlan([_write_item(name, tensor) for name, tensor in tensors.items()])
    # torch numbers files by the place of a plan among those of all ranks.
    plan = writer.prepare_global_plan([*[SavePlan([])] * rank, plan])[rank]
    results = writer.write_data(plan, _SavePlanner(tensors)).value() if plan.items else []
    return WrittenTensors(plan, results)


def write_metadata(folder: str, written: Sequence[WrittenTensors]) -> None:
    """Write torch's index of what the ranks have written into `folder`."""
    _, metadata = create_default_global_save_plan([each.plan for each in written])
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), "tensors were written"
        _refuse_gaps(name, entry)
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, [each.results for each in written])


def _refuse_gaps(name: str, entry: TensorStorageMetadata) -> None:
    """Refuse a tensor of which rows are missing, or written twice.

    Raises:
        CheckpointError: some are.
    """
    if not entry.size:
        return
    chunks = sorted(entry.chunks, key=lambda chunk: chunk.offsets[0])
    ends = [0, *itertools.accumulate(chunk.sizes[0] for chunk in chunks)]
    if [*(chunk.offsets[0] for chunk in chunks), entry.size[0]] != ends:
        raise CheckpointError(
            "the ranks have not written the whole of a tensor",
            expected=f"{entry.size[0]} rows of {name}, each once",
            got=", ".join(f"{each.sizes[0]} from {each.offsets[0]}" for each in chunks),
            cause="their parts are of different moments of the run",
            fix="save again",
        )


def read_tensors(folder: str, targets: Tensors, files: Mapping[str, str]) -> None:
    """Read the values of `targets` from a checkpoint that any number of ranks wrote.

    Args:
        targets: by name; their values are overwritten.
        files: the checksums of the checkpoint's files. Each file is verified before it is read.

    Raises:
        CheckpointError: a file is missing, damaged, or would run code; or a value is nowhere; or
            the checkpoint was replaced while it was read.
    """
    index = {METADATA: files.get(METADATA, "none was written")}
    verify_files(folder, index)
    try:
        _read_verified(folder, targets, files)
    finally:
        # A directory that was saved anew has files of the same names and sizes, and another index.
        verify_files(folder, index)


def _read_verified(folder: str, targets: Tensors, files: Mapping[str, str]) -> None:
    reader = FileSystemReader(folder)
    metadata = _read_metadata(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    items: list[ReadItem] = []
    for name, target in targets.items():
        items += _read_items(folder, name, target, metadata)
    storage = metadata.storage_data or {}
    needed = {storage[item.storage_index].relative_path for item in items}
    for place in storage.values():
        if place.relative_path not in files or place.transform_descriptors:
            raise _needs_code_error(f"{place.relative_path}, which is no file of this checkpoint")
    verify_files(folder, {name: files[name] for name in sorted(needed)})
    reader.read_data(LoadPlan(items), _LoadPlanner(targets))


def verify_files(folder: str, files: Mapping[str, str]) -> None:
    """Compare files with their checksums.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for name, expected in files.items():
        file = os.path.join(folder, name)
        try:
            got = sha256(file)
        except (FileNotFoundError, IsADirectoryError):
            got = "no such file"
        if got != expected:
            raise CheckpointError(
                "the checkpoint is damaged, or was saved anew while it was read",
                where=file,
                expected=f"sha256 {expected}",
                got=got,
                cause="it was cut off, changed or left out after it was written",
                fix="read it again; load an older checkpoint, or copy this one again from where it"
                " was written",
            )


def sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _values(tensor: torch.Tensor | LocalRows) -> torch.Tensor:
    return tensor.rows if isinstance(tensor, LocalRows) else tensor


def _chunk_of(tensor: torch.Tensor | LocalRows) -> ChunkStorageMetadata:
    """Where the values of `tensor` lie in the whole one."""
    offsets = [0] * len(tensor.shape)
    if isinstance(tensor, LocalRows):
        offsets[0] = tensor.first
    return ChunkStorageMetadata(torch.Size(offsets), _values(tensor).shape)


def _write_item(name: str, tensor: torch.Tensor | LocalRows) -> WriteItem:
    chunk, is_part = _chunk_of(tensor), isinstance(tensor, LocalRows)
    properties = TensorProperties.create_from_tensor(_values(tensor))
    return WriteItem(
        MetadataIndex(name, chunk.offsets),
        WriteItemType.SHARD if is_part else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(chunk, properties, tensor.shape),
    )


class _SavePlanner(DefaultSavePlanner):
    """Finds a rank's values by the name alone: a rank has one piece of a tensor."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return _values(self._tensors[write_item.index.fqn]).detach()


class _LoadPlanner(DefaultLoadPlanner):
    """Finds where values belong, in whole tensors and in rows."""

    def __init__(self, targets: Tensors) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        piece = _values(self._targets[read_item.dest_index.fqn])
        for dim, (first, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            piece = piece.narrow(dim, first, length)
        return piece

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: torch has written into the place that `resolve_tensor` returned."""


def _read_items(
    folder: str, name: str, target: torch.Tensor | LocalRows, metadata: Metadata
) -> list[ReadItem]:
    """Which values torch has to read for `target`.

    Raises:
        CheckpointError: some are nowhere.
    """
    entry, wanted = metadata.state_dict_metadata.get(name), _values(target).numel()
    got = "nothing"
    if isinstance(entry, TensorStorageMetadata):
        got = f"a tensor of shape {tuple(entry.size)}"
        if entry.size == target.shape:
            chunks = [_chunk_of(target)] if wanted else []
            found = create_read_items_for_chunk_list(name, entry, chunks)
            num_found = sum(item.lengths.numel() for item in found)
            if num_found == wanted:
                return found
            got = f"{num_found} of {wanted} values"
    raise CheckpointError(
        "the checkpoint lacks a part of a tensor",
        where=os.path.join(folder, METADATA),
        expected=f"{name} of shape {tuple(target.shape)}",
        got=got,
        fix="load an older checkpoint",
    )


def _read_metadata(folder: str) -> Metadata:
    """torch's index of a folder, without running code."""
    with open(os.path.join(folder, METADATA), "rb") as file:
        metadata: Metadata = _AllowlistUnpickler(io.BytesIO(file.read())).load()
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:
            raise _needs_code_error(f"{name}: {type(entry).__name__}")
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


class _AllowlistUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _ALLOWED_GLOBALS.get(module, set()) or is_dtype:
            return super().find_class(module, name)
        raise _needs_code_error(f"{module}.{name}")


def _needs_code_error(got: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint holds an object that only code could rebuild; it was not run",
        got=got,
        cause="it was not written by lockstep, or altered on purpose",
        fix="do not use this directory",
    )
