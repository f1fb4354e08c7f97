# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a directory: tensors in the format of torch's distributed checkpoints.

::

    lockstep.ckpt     everything but the tensors, the tensors' shapes, and the checksum of every
                      other file; a file of `file_format`, so verified and read without running code
    .metadata, *.distcp   the tensors, for `torch.distributed.checkpoint` of any program

Each rank writes a file with what it alone has (`write_part`), and one process ties them together
(`finish_directory`) in a folder that then gets its name (`publish_directory`). Reading is in two
steps as well: `open_directory` returns the state with a `StoredTensor` in the place of each tensor,
and each rank reads what it is to have (`read_own_tensors`). So no process ever holds more than its
part.

The directory is written under another name and then renamed, so it exists whole or not at all. To
replace a directory takes two renames: a process that is killed between them leaves the old
directory beside the path as ``.lockstep-*.old``. What a user has put into the old directory is
linked into the new one before.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.checkpoint.atomic_write import fsync_path, sync_new_name, write_error
from lockstep.checkpoint.file_format import read_file, write
from lockstep.checkpoint.plain_values import plain_state
from lockstep.checkpoint.temporary_paths import held_path, moved_away, remove_leftovers
from lockstep.errors import CheckpointError, CheckpointWriteError
from lockstep.local_rows import LocalRows
from lockstep.tensor_tree import KeyPath, rebuild_container, tree_map, tree_map_with_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from lockstep.checkpoint.dcp_tensors import WrittenTensors

INDEX: Final = "lockstep.ckpt"
_MARK: Final = "\0tensor"
_OWN_FILE: Final = re.compile(r"lockstep\.ckpt|\.metadata|__\d+_\d+\.distcp")


@dataclass(frozen=True)
class WrittenPart:
    """What one rank has written into a directory.

    Attributes:
        state: the rank's state, each tensor replaced by its description.
        own: the keys under which each rank has something else.
        in_rows: the names of tensors that the ranks share out.
        tensors: what torch knows of the files.
        files: the checksums of the rank's files, by name.
    """

    state: dict[str, Any]
    own: tuple[str, ...]
    in_rows: tuple[str, ...]
    tensors: WrittenTensors
    files: dict[str, str]


class StoredTensor:
    """A tensor in a checkpoint directory, which is not read yet.

    Attributes:
        folder: the directory.
        files: the checksums of the files in it.
        name: the tensor's name there.
        shape, dtype: of the whole tensor.
        in_rows: the ranks that wrote it shared it out.
    """

    def __init__(
        self,
        folder: str,
        files: Mapping[str, str],
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        in_rows: bool,
    ) -> None:
        self.folder = folder
        self.files = files
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.in_rows = in_rows


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
    with publish_directory(path) as folder:
        part = write_part(folder, state, rank=0)
        finish_directory(folder, [part], part.state)
    return os.fspath(path)


@contextmanager
def publish_directory(path: str | os.PathLike[str]) -> Iterator[str]:
    """Inside, write files into the folder that is given; then it gets the name `path`.

    Raises:
        CheckpointError: `path` exists and is no checkpoint directory.
        CheckpointWriteError: the directory could not be written (also an OSError).
    """
    try:
        with _renamed_to(os.fspath(path)) as folder:
            yield folder
    except CheckpointWriteError:
        raise
    except OSError as error:
        raise write_error(os.fspath(path), error) from error


@contextmanager
def _renamed_to(path: str) -> Iterator[str]:
    """A folder beside `path`, which is renamed to `path` at the end."""
    target = os.path.realpath(path)
    with suppress(OSError):
        remove_leftovers(os.path.dirname(target))
    is_empty = os.path.isdir(target) and not os.listdir(target)
    if os.path.lexists(target) and not is_empty and not is_checkpoint_directory(target):
        raise CheckpointError(
            "something else than a checkpoint directory is in the way",
            where=path,
            expected="a new name, or a directory that `save` wrote",
            fix="choose another path",
        )
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with held_path(os.path.dirname(target), os.mkdir) as temporary:
        try:
            yield temporary
            replaces = os.path.isdir(target)
            if replaces:
                _carry_over(target, temporary)
            with moved_away(target) if replaces else nullcontext():
                os.rename(temporary, target)
                for folder in (target, os.path.dirname(target)):
                    sync_new_name(folder, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _carry_over(old: str, new: str) -> None:
    """Give the folder `new` what a user has put into the directory `old`, which goes."""
    for name in os.listdir(old):
        if _OWN_FILE.fullmatch(name):
            continue
        source, target = os.path.join(old, name), os.path.join(new, name)
        if os.path.isdir(source) and not os.path.islink(source):
            shutil.copytree(source, target, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(source, target)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


def write_part(
    folder: str, state: Mapping[str, Any], rank: int, own: Collection[str] = ()
) -> WrittenPart:
    """Write what `rank` has of a state into `folder`. Ranks write at the same time.

    Args:
        state: the same tree on every rank, with `LocalRows` for what the ranks share out. Of what
            is whole rank 0 writes its copy.
        rank: this rank.
        own: the keys under which each rank has something else, and writes it.

    Raises:
        CheckpointError: see `plain_state`.
    """
    from lockstep.checkpoint.dcp_tensors import sha256, write_tensors

    common = plain_state(state)
    mine = {key: common.pop(key) for key in own}
    tensors: dict[str, torch.Tensor | LocalRows] = {}
    hollow = _take_tensors_out(common, tensors, "")
    in_rows = tuple(name for name, each in tensors.items() if isinstance(each, LocalRows))
    if rank > 0:
        rows = {name: each for name, each in tensors.items() if isinstance(each, LocalRows)}
        tensors = {name: each for name, each in rows.items() if len(each.rows)}
    hollow |= _take_tensors_out(mine, tensors, f"rank-{rank}." if rank > 0 else "")
    written = write_tensors(folder, tensors, rank)
    files = {name: sha256(os.path.join(folder, name)) for name in sorted(written.files)}
    return WrittenPart(hollow, tuple(own), in_rows, written, files)


def finish_directory(folder: str, parts: Sequence[WrittenPart], state: Mapping[str, Any]) -> None:
    """Tie the files that the ranks have written into `folder` together.

    Args:
        parts: of rank 0, 1, ...
        state: made of the states of `parts`.
    """
    files = {name: digest for part in parts for name, digest in part.files.items()}
    for name in os.listdir(folder):
        if name not in files:
            os.unlink(os.path.join(folder, name))  # of a rank that died, and wrote for nothing
    if files:
        from lockstep.checkpoint.dcp_tensors import METADATA, sha256, write_metadata

        write_metadata(folder, [part.tensors for part in parts])
        files[METADATA] = sha256(os.path.join(folder, METADATA))
    for name in files:
        fsync_path(os.path.join(folder, name))
    in_rows = list(parts[0].in_rows)
    write(os.path.join(folder, INDEX), {"state": state, "files": files, "in_rows": in_rows})


def open_directory(path: str) -> dict[str, Any]:
    """The state in a directory, with a `StoredTensor` in the place of each tensor.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    path = os.path.abspath(path)  # a worker's own directory is another one
    index = read_file(os.path.join(path, INDEX))
    files, in_rows = index["files"], set(index.get("in_rows", []))
    if files:
        from lockstep.checkpoint.dcp_tensors import verify_files

        verify_files(path, files)

    def put_in(like: Any, values: list[Any]) -> Any:
        if not isinstance(like, Mapping) or _MARK not in like:
            return rebuild_container(like, values)
        name, shape, dtype = like[_MARK]
        return StoredTensor(path, files, name, torch.Size(shape), dtype, in_rows=name in in_rows)

    state: dict[str, Any] = tree_map(lambda leaf: leaf, index["state"], put_in)
    return state


def is_here(stored: StoredTensor) -> bool:
    """Whether this host sees the directory that `stored` is in."""
    from lockstep.checkpoint.dcp_tensors import METADATA, sha256

    path = os.path.join(stored.folder, METADATA)
    return os.path.isfile(path) and sha256(path) == stored.files.get(METADATA)


def _empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def read_own_tensors(
    state: Any,
    rank: int = 0,
    num_ranks: int = 1,
    empty: Callable[[torch.Size, torch.dtype], torch.Tensor] = _empty,
) -> Any:
    """`state`, with the values of each `StoredTensor` that `rank` among `num_ranks` ranks has.

    For more than one rank these are `LocalRows` of what ranks have shared out; else whole tensors,
    in memory that `empty` makes.

    Raises:
        CheckpointError: a file is missing, damaged, or would run code.
    """
    targets: dict[str, dict[str, torch.Tensor | LocalRows]] = {}  # by folder and name
    files: dict[str, Mapping[str, str]] = {}

    def make_target(leaf: Any) -> Any:
        if not isinstance(leaf, StoredTensor):
            return leaf
        files[leaf.folder] = leaf.files
        found = targets.setdefault(leaf.folder, {})
        if leaf.name not in found:
            found[leaf.name] = (
                LocalRows.empty(leaf.shape, leaf.dtype, rank, num_ranks)
                if leaf.in_rows and num_ranks > 1
                else empty(leaf.shape, leaf.dtype)
            )
        return found[leaf.name]

    filled = tree_map(make_target, state)
    for folder, found in targets.items():
        from lockstep.checkpoint.dcp_tensors import read_tensors

        read_tensors(folder, found, files[folder])
    return filled


def _take_tensors_out(
    state: Mapping[str, Any], tensors: dict[str, torch.Tensor | LocalRows], prefix: str
) -> dict[str, Any]:
    """The same structure, each tensor replaced by its name, shape and dtype."""

    def take_out(path: KeyPath, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor | LocalRows):
            return leaf
        # The number makes names unique: keys of different types may have the same text.
        name = "".join([prefix, str(len(tensors)), *(f".{key.value}" for key in path)])
        tensors[name] = leaf
        values = leaf.rows if isinstance(leaf, LocalRows) else leaf
        return {_MARK: [name, list(leaf.shape), values.dtype]}

    hollow: dict[str, Any] = tree_map_with_path(take_out, state)
    return hollow
