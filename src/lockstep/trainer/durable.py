# SPDX-License-Identifier: Apache-2.0
"""A run that outlives its driver: checkpoints while it trains, and where it goes on from.

A worker copies its state between two steps; the driver fetches the copy and writes it in a thread
of its own. Training waits for the copy alone.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep import checkpoint
from lockstep.checkpoint.rotation import Rotation
from lockstep.errors import (
    CheckpointError,
    CheckpointWriteError,
    ConfigurationError,
    NotAvailableError,
)
from lockstep.trainer.arguments import is_positive_int, require
from lockstep.trainer.background import BackgroundWriter
from lockstep.trainer.preemption import PreemptionNotice
from lockstep.trainer.state import KeepsState
from lockstep.worker import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.worker import WorkerSpec

_log = logging.getLogger("lockstep.checkpoint")


class Durability:
    """What a trainer was asked to keep on the disk, and what it found there.

    Args:
        folder: `checkpoint_dir`.
        every: `checkpoint_every`.
        keep: `keep_checkpoints`.
        resume: None, "auto", or the path of a checkpoint.
        sync: as the trainer's; under "fsdp" a checkpoint is a directory.

    Attributes:
        every: steps between two checkpoints; None for none.
        found: the state to go on from; None for a fresh start.

    Raises:
        ConfigurationError: arguments that do not fit together, or the directory holds
            checkpoints of a run that was not asked to go on.
        CheckpointError: there are checkpoints, and none can be read.
        CheckpointWriteError: the directory cannot be written to.
    """

    def __init__(self, folder: Any, every: Any, keep: Any, resume: Any, sync: str) -> None:
        _check(folder, every, keep, resume)
        self.every: int | None = every
        self.found: dict[str, Any] | None = None
        self._rotation: Rotation | None = None
        if folder is not None:
            write = checkpoint.write_directory if sync == "fsdp" else checkpoint.write
            self._rotation = Rotation(os.path.abspath(folder), keep, write, checkpoint.read)
            self._rotation.claim()
        self._source = self._find(resume)

    @property
    def is_on(self) -> bool:
        """There is a directory to write to."""
        return self._rotation is not None

    def _find(self, resume: Any) -> str | None:
        if resume is None:
            self._refuse_to_mix()
        elif resume != "auto":
            self.found = checkpoint.read(resume)
            return str(os.fspath(resume))
        elif self._rotation is not None and (newest := self._rotation.newest()) is not None:
            path, self.found = newest
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

    def fitted(self, spec: WorkerSpec) -> WorkerSpec:
        """`spec` with `num_shards` and `seed` of the state that was found.

        Raises:
            CheckpointError: it has fewer shards than there are workers.
            NotAvailableError: no moment is the same for all ranks.
        """
        spec = replace(spec, checkpoint_every=self.every)
        _refuse_uncollectable(spec)
        if self.found is None:
            return spec
        shards = self.found.get("num_shards", spec.num_shards)
        if shards < spec.num_workers:
            raise CheckpointError(
                "the run cuts every global batch into fewer shards than there are workers",
                where=self._source,
                expected=f"at most {shards} workers",
                got=f"num_workers={spec.num_workers}",
                fix=f"TorchTrainer(..., num_workers={shards}); a run that is to grow is begun with"
                " num_shards of the most workers that it will have",
            )
        return replace(spec, num_shards=shards, seed=self.found.get("seed", spec.seed))

    def write(self, snapshot: Snapshot) -> None:
        """Write one, and let go of the oldest."""
        assert self._rotation is not None, "asked for only where `is_on`"
        path = self._rotation.write(snapshot.step, snapshot.state)
        _log.info("step %d is safe: %s", snapshot.step, path)

    def announce(self) -> None:
        """The state that was found has been taken over."""
        assert self.found is not None
        _log.info("going on after step %d: %s", self.found["global_step"], self._source)
        self.found = None  # as large as the model


def _check(folder: Any, every: Any, keep: Any, resume: Any) -> None:
    path_like = (str, os.PathLike)
    require(
        folder is None or isinstance(folder, path_like),
        "checkpoint_dir",
        folder,
        "the path of a directory, or None",
    )
    require(
        every is None or is_positive_int(every),
        "checkpoint_every",
        every,
        "a positive number of steps, or None",
    )
    require(is_positive_int(keep), "keep_checkpoints", keep, "an int, 1 or more")
    require(
        resume is None or isinstance(resume, path_like),
        "resume",
        resume,
        '"auto", the path of a checkpoint, or None',
    )
    without = [name for name, asked in _need_folder(every, resume) if asked and folder is None]
    for name in without:
        raise ConfigurationError(
            f"{name} needs a directory",
            got="checkpoint_dir=None",
            fix='TorchTrainer(..., checkpoint_dir="checkpoints")',
        )


def _need_folder(every: Any, resume: Any) -> list[tuple[str, bool]]:
    return [("checkpoint_every", every is not None), ('resume="auto"', resume == "auto")]


def _refuse_uncollectable(spec: WorkerSpec) -> None:
    """Operators' own states are collected when all ranks have counted the same steps.

    Raises:
        NotAvailableError: here each counts for itself.
    """
    counts_alone = spec.num_workers > 1 and not spec.options.add_dist_sampler
    if spec.checkpoint_every is not None and counts_alone:
        needed = spec.operator_cls._overrides("state_dict")
        if needed or spec.options.sync == "fsdp":
            raise NotAvailableError(
                "checkpoints cannot be taken in the middle of training here",
                got="add_dist_sampler=False, and a state that no rank knows alone",
                cause="every rank has steps of its own, so there is none for all to stop at",
                fix="leave checkpoint_every out, and call save(path) between calls",
            )


class Saving:
    """Takes the workers' copies while they train, and has them written. See `Keeper`.

    Args:
        durability: where to.

    Attributes:
        notice: SIGTERM, while a call trains.
    """

    def __init__(self, durability: Durability) -> None:
        self.notice = PreemptionNotice()
        self._writer = BackgroundWriter(durability.write)

    def keep(self, snapshot: Snapshot) -> None:
        self._writer.submit(snapshot)
        if self.notice.is_pending:
            _log.warning("SIGTERM: ending with the checkpoint of step %d", snapshot.step)
            self._writer.finish()
            self.notice.take_effect()

    def keep_failed(self, error: Exception) -> None:
        self._writer.failed(error)

    def finish(self) -> CheckpointWriteError | None:
        """Wait until everything is written; why the latest is not, if so."""
        failure = self._writer.finish()
        return None if failure is None else _as_write_error(failure)

    def close(self) -> CheckpointWriteError | None:
        """As `finish`, for good."""
        failure = self._writer.close()
        return None if failure is None else _as_write_error(failure)


class SavesMeanwhile(KeepsState):
    """The part of a trainer that keeps checkpoints while it trains."""

    _durability: Durability

    def __init__(self) -> None:
        super().__init__()
        self._saving: Saving | None = None
        self._fetcher: Any = None

    def _fitted(
        self, spec: WorkerSpec, folder: Any, every: Any, keep: Any, resume: Any
    ) -> WorkerSpec:
        """`spec`, as the state that was found wants it; see `Durability`."""
        durability = Durability(folder, every, keep, resume, spec.options.sync)
        self._durability = durability
        if durability.found is not None:
            self._refuse_another_run(durability.found)
        return durability.fitted(spec)

    def _begin_durably(self) -> None:
        """Go on from what was found, and expect copies from the workers."""
        if self._durability.found is not None:
            self.load_state_dict(self._durability.found)
            self._durability.announce()
        if self._durability.is_on:
            self._saving = Saving(self._durability)
            self._fetcher = self._engine.bring_snapshots(self._saving)

    @contextmanager
    def _saving_meanwhile(self) -> Iterator[None]:
        """Around a call that trains."""
        saving = self._saving
        if saving is None:
            yield
            return
        with saving.notice.heeded(self._fetcher.request):
            yield
            self._fetcher.finish()
            if saving.notice.is_pending:
                state = self.state_dict()
                saving.keep(Snapshot(state["global_step"], state))

    def _saved(self, result: Any) -> Any:
        """`result`, when nothing of the call is pending.

        Raises:
            CheckpointWriteError: the latest checkpoint could not be written.
        """
        error = None if self._saving is None else self._saving.finish()
        if error is not None:
            error.result = result
            error.add_note(
                "Training is not affected: the trainer can go on, and what this call would have"
                " returned is in the `result` of this error."
            )
            raise error
        return result

    def _all_written(self, *, force: bool) -> None:
        """The end of the trainer; `force`: what cannot be written is in the log only."""
        saving, self._saving = self._saving, None
        error = None if saving is None else saving.close()
        if error is not None and not force:
            raise error


def _as_write_error(failure: Exception) -> CheckpointWriteError:
    if isinstance(failure, CheckpointWriteError):
        return failure
    details = failure.details if isinstance(failure, CheckpointError) else {}
    error = CheckpointWriteError(
        "a checkpoint could not be written",
        got=getattr(failure, "what", None) or f"{type(failure).__name__}: {failure}",
        cause=details.get("cause"),
        fix=details.get("fix"),
    )
    error.__cause__ = failure
    return error
