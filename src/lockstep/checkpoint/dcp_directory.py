# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a directory: tensors in the format of torch's distributed checkpoints.

::

    lockstep.ckpt     everything but the tensors, the tensors' shapes, and the checksum of every
                      other file; a file of `file_format`, so verified and read without running code
    .metadata, *.distcp   the tensors, for `torch.distributed.checkpoint` of any program

The directory is written under another name and then renamed, so it exists whole or not at all. To
replace a directory takes two renames: a process that is killed between them leaves the old
directory beside the path as ``.lockstep-*.old``.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.checkpoint.atomic_write import fsync_path, write_error
from lockstep.checkpoint.file_format import read_file, write
from lockstep.checkpoint.plain_values import plain_state
from lockstep.errors import CheckpointError, CheckpointWriteError
from lockstep.tensor_tree import KeyPath, rebuild_container, tree_map, tree_map_with_path

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

INDEX: Final = "lockstep.ckpt"
_MARK: Final = "\0tensor"
_METADATA: Final = ".metadata"

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
}


def is_checkpoint_directory(path: str) -> bool:
    """Whether `path` is a directory that `write_directory` wrote."""
    return os.path.isfile(os.path.join(path, INDEX))


def write_directory(path: str | os.PathLike[str], state: Mapping[str, Any]) -> str:
    """Save `state` as `write` does, into a directory whose tensors any torch program can read.

    A program may also read its own shards of the tensors only.

    Returns:
        `path` as a string.

    Raises:
        CheckpointError: see `write`; or `path` exists and is no such directory.
        CheckpointWriteError: the directory could not be written (also an OSError).
    """
    plain = plain_state(state)
    try:
        _write_and_rename(os.fspath(path), plain)
    except CheckpointWriteError:
        raise
    except OSError as error:
        raise write_error(path, error) from error
    return os.fspath(path)


def _write_and_rename(path: str, plain: Mapping[str, Any]) -> None:
    """Write a directory beside `path`, and rename it to `path`."""
    target = os.path.realpath(path)
    is_empty = os.path.isdir(target) and not os.listdir(target)
    if os.path.lexists(target) and not is_empty and not is_checkpoint_directory(target):
        raise CheckpointError(
            "something else than a checkpoint directory is in the way",
            where=path,
            expected="a new name, or a directory that `save` wrote",
            fix="choose another path",
        )
    os.makedirs(os.path.dirname(target), exist_ok=True)
    stem = os.path.join(os.path.dirname(target), f".lockstep-{secrets.token_hex(8)}")
    try:
        os.mkdir(f"{stem}.tmp")
        _write_files(f"{stem}.tmp", plain)
        if os.path.isdir(target):
            os.rename(target, f"{stem}.old")
        os.rename(f"{stem}.tmp", target)
    except BaseException:
        if os.path.isdir(f"{stem}.old") and not os.path.exists(target):
            os.rename(f"{stem}.old", target)
        raise
    finally:
        shutil.rmtree(f"{stem}.tmp", ignore_errors=True)
        shutil.rmtree(f"{stem}.old", ignore_errors=True)


def _write_files(folder: str, plain: Mapping[str, Any]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    hollow = _take_tensors_out(plain, tensors)
    if tensors:
        from torch.distributed.checkpoint.state_dict_saver import save

        with _single_process_warning_ignored():
            save(tensors, checkpoint_id=folder, no_dist=True)
    files = {name: _sha256(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}
    for name in files:
        fsync_path(os.path.join(folder, name))
    write(os.path.join(folder, INDEX), {"state": hollow, "files": files})


def read_directory(path: str) -> dict[str, Any]:
    """The state in a directory that `write_directory` wrote.

    Raises:
        CheckpointError: a file is missing, damaged, or would run code.
    """
    index = read_file(os.path.join(path, INDEX))
    for name, expected in index["files"].items():
        file = os.path.join(path, name)
        got = _sha256(file) if os.path.isfile(file) else "no such file"
        if got != expected:
            raise CheckpointError(
                "the checkpoint is damaged",
                where=file,
                expected=f"sha256 {expected}",
                got=got,
                cause="it was cut off, changed or left out after it was written",
                fix="load an older checkpoint, or copy this one again from where it was written",
            )
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = _put_tensors_in(index["state"], tensors)
    if tensors:
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = _verified_reader(path, set(index["files"]))
        reader.read_metadata()  # called here too: `load` would wrap a CheckpointError in its own
        with _single_process_warning_ignored():
            load(tensors, storage_reader=reader, no_dist=True)
    return state


def _take_tensors_out(state: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """The same structure, each tensor replaced by its name, shape and dtype."""

    def take_out(path: KeyPath, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # The number makes names unique: keys of different types may have the same text.
        name = "".join([str(len(tensors)), *(f".{key.value}" for key in path)])
        tensors[name] = leaf
        return {_MARK: [name, list(leaf.shape), leaf.dtype]}

    return tree_map_with_path(take_out, state)


def _put_tensors_in(hollow: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state with empty tensors in the places of their descriptions; collects them by name."""

    def put_in(like: Any, values: list[Any]) -> Any:
        if not isinstance(like, Mapping) or _MARK not in like:
            return rebuild_container(like, values)
        name, shape, dtype = like[_MARK]
        tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
        return tensors[name]

    return tree_map(lambda leaf: leaf, hollow, put_in)


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


def _verified_reader(path: str, verified: Set[str]) -> FileSystemReader:
    """A reader of tensors that reads only files whose checksum was right."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            with self.fs.create_stream(os.path.join(self.path, _METADATA), "rb") as file:
                metadata: Metadata = _AllowlistUnpickler(io.BytesIO(file.read())).load()
            for name, entry in metadata.state_dict_metadata.items():
                if type(entry) is not TensorStorageMetadata:
                    raise _needs_code_error(f"{name}: {type(entry).__name__}")
            for entry in metadata.storage_data.values():
                if entry.relative_path not in verified or entry.transform_descriptors:
                    raise _needs_code_error(
                        f"{entry.relative_path}, which is no file of this checkpoint"
                    )
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(path)


@contextmanager
def _single_process_warning_ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch warns that it assumes one process, which `no_dist=True` has told it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
