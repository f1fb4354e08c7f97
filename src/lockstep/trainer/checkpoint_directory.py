# SPDX-License-Identifier: Apache-2.0
"""`CheckpointDirectory`: finds the checkpoint to resume from, and writes the run's checkpoints."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep import checkpoint
from lockstep.checkpoint.directory_lock import DirectoryLock, lock_directory
from lockstep.checkpoint.rotation import Rotation
from lockstep.errors import (
    CheckpointError,
    ConfigurationError,
)
from lockstep.trainer.argument_checks import require, require_count
from lockstep.trainer.checkpoint_writer import CheckpointWriter
from lockstep.trainer.run_log import RunLog
from lockstep.trainer.snapshot_files import write_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lockstep.engine import Engine
    from lockstep.trainer.snapshot_files import WriteParts
    from lockstep.worker import Snapshot, WorkerSpec

_log = logging.getLogger("lockstep.checkpoint")


class CheckpointDirectory:
    """The checkpoint directory of a run, and the state that the run resumes from.

    Args:
        folder: the trainer's `checkpoint_dir`; None writes no checkpoints.
        every: the trainer's `checkpoint_every`.
        keep: the trainer's `keep_checkpoints`.
        resume: None, "auto", or the path of a checkpoint.
        sync: the trainer's `sync`; under "fsdp" a checkpoint is a directory.

    Attributes:
        every: steps between two checkpoints; None for none.
        resume_state: the state to resume from; None for a fresh start.
        resumes_own: the run goes on from one of the checkpoints in `folder`, and so with the run
            that has written them.
        writer: writes the checkpoints of the workers; None without a directory.

    Raises:
        ConfigurationError: arguments that do not fit together; the directory holds checkpoints
            and `resume` is None; or another program trains there.
        CheckpointError: there are checkpoints, and none can be read.
        CheckpointWriteError: the directory cannot be written to.
    """

    def __init__(self, folder: Any, every: Any, keep: Any, resume: Any, sync: str) -> None:
        _check_arguments(folder, every, keep, resume)
        self._sync = sync
        self.every: int | None = every
        self.resume_state: dict[str, Any] | None = None
        self.resumes_own = False
        self._rotation: Rotation | None = None
        self.writer: CheckpointWriter | None = None
        self._lock: DirectoryLock | None = None
        self._run: object | None = None
        if folder is not None:
            self._rotation = Rotation(os.path.abspath(folder), keep, self.read)
            self._rotation.prepare_folder()
            self._lock = lock_directory(self._rotation.folder)
        self._source = self._find(resume)
        if self._rotation is not None:
            if self._source is not None:
                self.resumes_own = self._rotation.resume_from(self._source)
            # Not before: a trainer that is refused leaves the directory as it is.
            self._rotation.remove_leftovers()

    @property
    def run_logs(self) -> list[RunLog]:
        """The run's log, if there is a directory for it."""
        return [] if self._rotation is None else [RunLog(self._rotation.folder)]

    @property
    def log_folder(self) -> str:
        """The directory with the run's log.

        Raises:
            ConfigurationError: there is none.
        """
        if self._rotation is None:
            raise ConfigurationError(
                "a step cannot be computed again without the run's log",
                got="checkpoint_dir=None",
                fix="TorchTrainer(..., checkpoint_dir=..., checkpoint_every=...)",
            )
        return self._rotation.folder

    def _find(self, resume: Any) -> str | None:
        if resume is None:
            self._refuse_to_mix()
        elif resume != "auto":
            self.resume_state = self.read(resume)
            return str(os.fspath(resume))
        elif self._rotation is not None and (newest := self._rotation.read_newest()) is not None:
            path, self.resume_state = newest
            return path
        return None

    def _refuse_to_mix(self) -> None:
        if self._rotation is None or not (steps := self._rotation.steps()):
            return
        raise ConfigurationError(
            "checkpoint_dir holds the checkpoints of a run",
            where=self._rotation.folder,
            got=f"checkpoints up to step {steps[-1]}, and resume=None",
            cause="a run that begins anew would mix its checkpoints with them",
            fix='resume="auto" goes on from the newest; a new run takes an empty directory',
        )

    def adjust_spec(self, spec: WorkerSpec, explicit: Mapping[str, Any]) -> WorkerSpec:
        """`spec` with `num_shards` and `seed` of the state that was found.

        Args:
            explicit: the values of both that the user gave; None if not given.

        Raises:
            CheckpointError: the state has fewer shards than there are workers, or the user said
                another `num_shards` or `seed`.
            ConfigurationError: it has more, and each worker reads a loader of its own.
        """
        if self.resume_state is not None:
            refuse_another_run(self.resume_state, explicit)
        spec = replace(spec, checkpoint_every=self.every)
        if self.resume_state is None:
            return spec
        spec = spec.with_shards_of(self.resume_state, self._source)
        return replace(spec, seed=self.resume_state.get("seed", spec.seed))

    def read(self, path: str) -> dict[str, Any]:
        """The state that is at `path`, in the directory or elsewhere."""
        # Under fsdp each worker reads its rows: the whole state may fit nowhere.
        return checkpoint.open_checkpoint(path) if self._sync == "fsdp" else checkpoint.read(path)

    def start_writer(self, engine: Engine) -> None:
        """Start to write the checkpoints of the workers, if there is a directory."""
        if self._rotation is not None:
            write = partial(self.write, write_parts=engine.write_parts)
            self.writer = CheckpointWriter(write, engine)

    def claim(self) -> CheckpointWriter | None:
        """The writer, for a call that trains; None without a directory.

        A trainer that a notebook has replaced stays open for a while, so that another one may
        begin in the same directory. From then on that one's run is there, and no other.

        Raises:
            ConfigurationError: another trainer of this process has trained there meanwhile.
        """
        if self._lock is None:
            return None
        if self._run is None:
            self._run = self._lock.run = object()
        elif self._is_replaced:
            raise ConfigurationError(
                "another trainer of this program trains in checkpoint_dir",
                where=self.log_folder,
                cause="two trainers were given one directory, and would mix their checkpoints",
                fix="give each a checkpoint_dir of its own; save(path) keeps what this one has",
            )
        return self.writer

    @property
    def _is_replaced(self) -> bool:
        """Whether another trainer has trained in the directory since this one has."""
        lock, own = self._lock, self._run
        return lock is not None and own is not None and lock.run is not own

    def go_on_from(self, step: int) -> None:
        """Note that the run goes on from a state of `step` that was loaded."""
        if self._rotation is not None and self.writer is not None:
            self.writer.go_on_from(step)
            self._rotation.go_on_from(step)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether there is a directory, to which the run's checkpoints are written."""
        return self._rotation is not None

    def renew(self, step: int, take_snapshot: Callable[[], Snapshot]) -> None:
        """Write the run's newest checkpoint again if it is of `step`, whose state has changed.

        Returns when that is written, so that training goes on from what is on the disk: a state
        that is not a copy (see `StateTransfer.snapshot`) changes with the next step. The older
        checkpoint stays until then. A failure is that of the next call which trains. Nothing is
        written into the run of a trainer that has replaced this one.
        """
        assert self._rotation is not None, "the run keeps checkpoints"
        assert self.writer is not None, "`start_writer` comes first"
        if self._is_replaced:
            return
        if self.writer.latest_step != step and not self._rotation.is_newest(step):
            return
        self.writer.wait()
        if self._rotation.is_newest(step):
            self.writer.write_now(take_snapshot())

    def write(self, snapshot: Snapshot, write_parts: WriteParts) -> str:
        """Write a checkpoint, and let go of the oldest; returns its path."""
        assert self._rotation is not None, "`start_writer` makes no writer without a directory"
        write = partial(self.write_to, snapshot, write_parts)
        path = self._rotation.write(snapshot.step, write, is_folder=self._sync == "fsdp")
        _log.info("step %d is safe: %s", snapshot.step, path)
        return path

    def write_to(self, snapshot: Snapshot, write_parts: WriteParts, path: str) -> str:
        """Write `snapshot` to `path`, in the directory or elsewhere; returns `path`."""
        return write_snapshot(
            snapshot, path, in_shards=self._sync == "fsdp", write_parts=write_parts
        )

    def close(self, *, raises: bool) -> None:
        """End the thread that writes, and leave the directory to other programs.

        Raises:
            CheckpointWriteError: `raises`, and the latest checkpoint could not be written.
        """
        try:
            if self.writer is not None:
                self.writer.close(raises=raises)
        finally:
            self._lock = None

    def finish_resume(self) -> None:
        """Log from which step the run goes on, and drop the state: the workers have loaded it."""
        assert self.resume_state is not None
        step = self.resume_state.get("global_step", 0)
        _log.info("going on after step %d: %s", step, self._source)
        self.resume_state = None  # as large as the model


def refuse_another_run(state: Mapping[str, Any], explicit: Mapping[str, Any]) -> None:
    """Refuse a state whose `num_shards` or `seed` differs from the user's explicit argument.

    Raises:
        CheckpointError: a value differs.
    """
    for name, value in explicit.items():
        if value is not None and state.get(name, value) != value:
            raise CheckpointError(
                f"the state was made with another {name}",
                expected=f"{name}={value}, as the trainer was told",
                got=f"{name}={state[name]}",
                fix=f"leave {name} out: it is taken from the state",
            )


def _check_arguments(folder: Any, every: Any, keep: Any, resume: Any) -> None:
    for name, path, expected in (
        ("checkpoint_dir", folder, "the path of a directory, or None"),
        ("resume", resume, '"auto", the path of a checkpoint, or None'),
    ):
        require(path is None or isinstance(path, str | os.PathLike), name, path, expected)
    expected = "a positive number of steps, or None"
    require_count("checkpoint_every", every, optional=True, expected=expected)
    require_count("keep_checkpoints", keep)
    for name, asked in (("checkpoint_every", every), ('resume="auto"', resume == "auto")):
        if asked and folder is None:
            raise ConfigurationError(
                f"{name} needs a directory",
                got="checkpoint_dir=None",
                fix='TorchTrainer(..., checkpoint_dir="checkpoints")',
            )
