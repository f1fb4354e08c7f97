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
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lockstep import checkpoint
from lockstep.local_rows import LocalRows
from lockstep.operator import TrainingOperator
from lockstep.phases import Phase, in_phase
from lockstep.tensor_tree import leaves_of
from lockstep.worker.state_dict import copy_own_rows
from lockstep.worker.tensor_pool import TensorPool

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lockstep.checkpoint import WrittenPart
    from lockstep.worker.state_access import StateAccess

_ARRIVAL_S: Final = 10.0
"""How long a rank may be behind rank 0 with its copy."""


class PartOnDisk(NamedTuple):
    """A part that a rank has written.

    Attributes:
        part: what it has written.
        sizes: of the files that the driver has to fetch, in bytes; None where it sees them.
    """

    part: WrittenPart
    sizes: dict[str, int] | None


class _Held(NamedTuple):
    """A part that waits to be written.

    Attributes:
        step: committed steps of the run.
        state: as `StateAccess.own_state_dict` returns it.
        pool: receives the memory of a copy when that has been written.
    """

    step: int
    state: dict[str, Any]
    pool: TensorPool | None


class CheckpointPart:
    """The latest copy of a rank's part. The training thread takes it; another thread writes it."""

    def __init__(self, worker: StateAccess) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        self._held: _Held | None = None
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
        state = self._worker.own_state_dict(partial(copy_own_rows, clone=clone))
        self._pool.clear()
        step: int = state["global_step"]
        with self._changed:
            self._held = _Held(step, state, pool)
            self._changed.notify_all()
        return step

    def drop(self) -> None:
        """Forget the copy: its step may come again, on other ranks."""
        with self._changed:
            self._held = None

    # ---------------------------------------------------------------- from another thread

    def write(self, step: int, folder: str) -> PartOnDisk | None:
        """Write the copy of `step` into `folder`, if that is on this host; else into a file here.

        Returns:
            None if this rank has no copy of that step any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._holds(step), _ARRIVAL_S)
            if not self._holds(step):
                return None
            held, self._held = self._held, None
        assert held is not None, "this rank holds the step"
        if os.path.isdir(folder):
            return PartOnDisk(self._write(held, folder), None)
        here = tempfile.mkdtemp(prefix="lockstep-")
        try:
            part = self._write(held, here)
            for name in part.files:
                self._files[name] = os.open(os.path.join(here, name), os.O_RDONLY)
            sizes = {name: os.fstat(self._files[name]).st_size for name in part.files}
        finally:
            shutil.rmtree(here)  # open files stay readable, and nothing is left of a killed process
        return PartOnDisk(part, sizes)

    def _holds(self, step: int) -> bool:
        return self._held is not None and self._held.step == step

    def _write(self, held: _Held, folder: str) -> WrittenPart:
        keeps_its_own = self._worker.operator._lockstep_overrides(TrainingOperator.state_dict)
        own = ("operator",) if keeps_its_own else ()
        try:
            return checkpoint.write_part(folder, held.state, self._worker.rank, own)
        finally:
            if held.pool is not None:
                leaves = leaves_of(held.state)
                held.pool.put_back(
                    [each.rows if isinstance(each, LocalRows) else each for each in leaves]
                )

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Some bytes of a file that waits here; after the last ones it is gone."""
        data = os.pread(self._files[name], size, offset)
        if len(data) < size:
            os.close(self._files.pop(name))
        return data
