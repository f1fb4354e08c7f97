# SPDX-License-Identifier: Apache-2.0
"""`CheckpointPart`: a rank's part of a checkpoint, from the copy of its state to the disk.

Where weights or optimizers' states are in shards no rank has the whole state. Each rank copies its
rows between two steps, and writes the copy into a file of its own while training goes on. Where the
checkpoint's folder is not on the rank's host, the file waits there for the driver to fetch it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from lockstep import checkpoint
from lockstep.checkpoint.temporary_paths import held_path, remove_leftovers
from lockstep.phases import Phase, in_phase
from lockstep.worker.snapshot import Snapshot
from lockstep.worker.state_dict import copy_own_rows
from lockstep.worker.tensor_pool import TensorPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep.checkpoint import WrittenPart
    from lockstep.worker.state_access import StateAccess


class PartOnDisk(NamedTuple):
    """A part that a rank has written.

    Attributes:
        part: what it has written.
        sizes: of the files that the driver has to fetch, in bytes; None where it sees them.
    """

    part: WrittenPart
    sizes: dict[str, int] | None


class CheckpointPart:
    """The latest copies of a rank's part. The training thread takes them; another one writes them.

    The driver asks for a copy a moment after rank 0 has taken it, and the next one may have been
    taken by then: two are kept.
    """

    def __init__(self, worker: StateAccess) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        self._held: list[Snapshot] = []
        self._may_copy = False
        self._num_drops = 0
        self._files: dict[str, int] = {}
        self._pool = TensorPool()

    def copy(self) -> int:
        """Copy this rank's part of the state as it is now; returns its step.

        Collective:
            None; where a user's `state_dict` returns shards, as `StateAccess.own_state_dict`.
        """
        return self._hold(self._pool.copy_of, self._pool)

    def hold(self) -> int:
        """As `copy`, without a copy of what is on the CPU: it is written before training goes on.

        Collective:
            As `copy`.
        """
        return self._hold(lambda tensor: tensor.to("cpu"), None)

    @in_phase(Phase.COPYING_STATE)
    def _hold(self, clone: Callable[[torch.Tensor], torch.Tensor], pool: TensorPool | None) -> int:
        is_read = self._worker.rank == 0 or bool(self._worker.per_rank_keys)
        whole = clone if is_read else _leave_out
        # The ranks of the first copy of the models write its rows.
        rows = clone if self._worker.mesh.replicate_rank == 0 else _leave_rows_out
        copy = partial(copy_own_rows, clone=rows, clone_whole=whole)
        state = self._worker.own_state_dict(copy)
        self._pool.clear()
        step: int = state["global_step"]
        with self._changed:
            outdated = self._held[:-1]
            self._held = [*self._held[-1:], Snapshot(step, state, pool)]
            self._changed.notify_all()
        for each in outdated:
            each.give_back()
        return step

    def drop(self) -> None:
        """Forget the copies: their steps may come again, with other values or on other ranks."""
        with self._changed:
            self._held = []
            self._num_drops += 1
            self._changed.notify_all()

    @contextmanager
    def during_training(self) -> Iterator[None]:
        """Around a call that trains: inside, a copy that rank 0 has taken already may still come
        here, after any time. Outside no copy comes that somebody waits for."""
        self._may_copy = True
        try:
            yield
        finally:
            with self._changed:
                self._may_copy = False
                self._changed.notify_all()

    # ---------------------------------------------------------------- from another thread

    def write(self, step: int, folder: str) -> PartOnDisk | None:
        """Write the copy of `step` into `folder`, if that is on this host; else into a file here.

        Waits until this rank has come to `step`, to which rank 0 has come.

        Returns:
            None if this rank has no copy of that step any more.
        """
        for name in list(self._files):  # of a part that nobody has fetched
            os.close(self._files.pop(name))
        with self._changed:
            num_drops = self._num_drops
            self._changed.wait_for(
                lambda: (
                    any(each.step >= step for each in self._held)
                    or not self._may_copy
                    or self._num_drops > num_drops
                )
            )
            held = next((each for each in self._held[::-1] if each.step == step), None)
            # Another copy of the step stays: a `save` and a checkpoint that is due write one each.
            self._held = [e for e in self._held if e is not held and e.step >= step]
        if held is None:
            return None
        if os.path.isdir(folder):
            return PartOnDisk(self._write(held, folder), None)
        with suppress(OSError):
            remove_leftovers(tempfile.gettempdir())  # of a worker that was killed in here
        with held_path(tempfile.gettempdir(), partial(os.mkdir, mode=0o700)) as here:
            try:
                part = self._write(held, here)
                for name in part.files:
                    self._files[name] = os.open(os.path.join(here, name), os.O_RDONLY)
                sizes = {name: os.fstat(self._files[name]).st_size for name in part.files}
            finally:
                shutil.rmtree(here)  # open files stay readable
        return PartOnDisk(part, sizes)

    def _write(self, held: Snapshot, folder: str) -> WrittenPart:
        assert held.state is not None, "a part is a state"
        own = self._worker.per_rank_keys
        try:
            return checkpoint.write_part(folder, held.state, self._worker.rank, own)
        finally:
            held.give_back()

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Some bytes of a file that waits here; after the last ones it is gone."""
        data = os.pread(self._files[name], size, offset)
        if len(data) < size:
            os.close(self._files.pop(name))
        return data


def _leave_rows_out(tensor: torch.Tensor) -> torch.Tensor:
    """In the place of rows that a rank of another copy writes: none."""
    return tensor.new_empty((0, *tensor.shape[1:]), device="cpu")


def _leave_out(tensor: torch.Tensor) -> torch.Tensor:
    """In the place of what rank 0 writes: nothing."""
    return torch.empty(0)
