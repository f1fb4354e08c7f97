# SPDX-License-Identifier: Apache-2.0
"""The actor around one worker. This module imports no torch, whose import is most of a launch.

`perform` and `perform_for_relay` run one remote method after the other. All other methods run in
concurrency groups of their own, so that the driver can reach a worker while it performs a method:
those that write to the disk in `files`, the calls that it brings to other workers in `relay`, and
those that answer at once in `control`.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import cloudpickle

import ray
from lockstep.engine.actor_imports_and_signals import set_up_actor_process
from lockstep.engine.call_relay import is_small, pass_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray.actor import ActorClass

    from lockstep.metrics.step_log import StepRow
    from lockstep.worker import (
        Outcome,
        PartOnDisk,
        ProgressReport,
        RemoteMethod,
        Worker,
        WorkerStatus,
    )


class WorkerActor:
    """An actor whose process becomes a worker when the driver assigns a spec and a rank.

    `perform` never raises: it returns a remote method's error in an `Outcome`. Calls have numbers
    (see `call_relay`): the driver's may come after a relay's, and a relay's after later calls.
    """

    def __init__(self, number: int) -> None:
        set_up_actor_process("lockstep.worker")
        self._spec = b""
        self._rank = number
        self._local_rank = 0
        self._worker: Worker | None = None
        self._training_thread = 0
        self._call_number = 0
        self._kept: Outcome | None = None
        self._actors: dict[str, Any] = {}

    def __repr__(self) -> str:
        # Ray writes this before every line that the process prints.
        return f"rank {self._rank}"

    @ray.method
    def assign(self, spec: bytes, rank: int, local_rank: int) -> tuple[str, str]:
        """Set the pickled spec and the ranks of the worker; called before the first `perform`.

        Returns:
            The id of the node that the process runs on, and the name of the actor.
        """
        self._spec, self._rank, self._local_rank = spec, rank, local_rank
        here = ray.get_runtime_context()
        return here.get_node_id(), here.get_actor_name() or ""

    @ray.method
    def perform(self, method: bytes, arguments: bytes, number: int) -> Outcome:
        """Call a remote method of the worker; the first call makes the worker.

        Args:
            method: the pickled `RemoteMethod`, a reference by name.
            arguments: the pickled positional and named arguments. They are a pickle of their own:
                where their classes cannot be imported here, the method's contract is still known.
            number: of the call. One that a relay has brought before is not performed again: this
                returns its outcome.
        """
        if number > self._call_number:
            return self._perform(method, arguments, number)
        kept, self._kept = self._kept, None
        return kept or self._lost_outcome(number)

    def _lost_outcome(self, number: int) -> Outcome:
        from lockstep.errors import WorkerFailedError
        from lockstep.worker import failed_outcome

        error = WorkerFailedError(
            "a call was performed, and its outcome is gone",
            where=f"rank {self._rank}",
            expected=f"the outcome of call {number}",
            got=f"a worker that has kept none, of {self._call_number} calls",
        )
        return failed_outcome(self._rank, error)

    @ray.method
    def perform_for_relay(self, method: bytes, arguments: bytes, number: int) -> Outcome | None:
        """As `perform`; None where the driver has to ask for the outcome, or does not want it."""
        if number <= self._call_number:
            return None  # the driver has asked by itself, or has gone on to another call
        self._kept = outcome = self._perform(method, arguments, number)
        return outcome if is_small(outcome) else None

    @ray.method(concurrency_group="relay")
    def relay(
        self, names: Sequence[str], method: bytes, arguments: bytes, number: int
    ) -> list[Outcome | None]:
        """Let workers perform a call, as a relay; see `pass_on`."""
        return pass_on(
            self._actors,
            names,
            lambda actor: actor.perform_for_relay.remote(method, arguments, number),
        )

    def _perform(self, method: bytes, arguments: bytes, number: int) -> Outcome:
        from lockstep.serialization import dumps_or_refuse
        from lockstep.worker import Communication, Outcome, RemoteCall, Worker, failed_outcome

        self._call_number, self._kept = number, None
        self._training_thread = threading.get_ident()
        called: RemoteMethod[Worker, ..., object] | None = None
        try:
            called = cloudpickle.loads(method)
            if self._worker is None:
                self._worker = Worker(_load_spec(self._spec), self._rank, self._local_rank)
            value = RemoteCall(called, *cloudpickle.loads(arguments)).perform(self._worker)
            self._rank = self._worker.rank
            if called is Worker.stop:
                # The process is ready for another trainer; only globals of modules remain.
                self._worker, self._spec = None, b""
                gc.collect()
            # Pickled here, so that a result that cannot travel is an error of this call.
            return Outcome(dumps_or_refuse(value, "what the worker returned"))
        except BaseException as error:
            # The peers wait for this rank in a collective: closing the sockets frees them.
            may_wait = called is None or called.contract.communication is Communication.RUN_GROUP
            if may_wait and self._worker is not None:
                self._worker.leave()
            return failed_outcome(self._rank, error)

    @ray.method(concurrency_group="control")
    def progress(self) -> ProgressReport:
        """See `progress_of`."""
        from lockstep.worker import ProgressReport, progress_of

        return ProgressReport() if self._worker is None else progress_of(self._worker)

    @ray.method(concurrency_group="control")
    def step_rows(self, since: int) -> tuple[int, Sequence[StepRow]]:
        """See `rows_after`."""
        from lockstep.worker import rows_after

        return (0, []) if self._worker is None else rows_after(self._worker, since)

    @ray.method(concurrency_group="control")
    def status(self) -> WorkerStatus | None:
        """The status of the training thread; None without a worker."""
        from lockstep.worker import status_of

        return None if self._worker is None else status_of(self._worker, self._training_thread)

    @ray.method(concurrency_group="control")
    def request_leave(self) -> None:
        """See `Worker.request_leave`."""
        if self._worker is not None:
            self._worker.request_leave()

    @ray.method(concurrency_group="control")
    def break_group(self, generation: int) -> None:
        """See `Worker.break_group`."""
        if self._worker is not None:
            self._worker.break_group(generation)

    @ray.method(concurrency_group="control")
    def snapshot(self, is_requested: bool) -> tuple[int, int, bytes, list[Any]] | None:
        """The latest snapshot that was not fetched yet: step, call, structure and arrays; or None.

        Args:
            is_requested: request a snapshot before the next batch.
        """
        from lockstep.serialization import split

        if self._worker is None:
            return None
        if is_requested:
            self._worker.snapshots.request()
        snapshot = self._worker.snapshots.pop_latest()
        if snapshot is None:
            return None
        structure, buffers = split(snapshot.state)
        # Ray stores arrays, and maps them on the other side, without pickling.
        return snapshot.step, snapshot.call, structure, [buffer.numpy() for buffer in buffers]

    @ray.method(concurrency_group="files")
    def write_part(self, step: int, folder: str) -> PartOnDisk | None:
        """See `CheckpointPart.write`."""
        worker = self._worker
        return None if worker is None else worker.snapshots.part.write(step, folder)

    @ray.method(concurrency_group="files")
    def read_part(self, name: str, offset: int, size: int) -> bytes:
        """See `CheckpointPart.read`."""
        assert self._worker is not None, "it has written the part"
        return self._worker.snapshots.part.read(name, offset, size)

    @ray.method(concurrency_group="control")
    def kill_process(self, pid: int) -> None:
        """Send SIGKILL to another process on this node."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _load_spec(spec: bytes) -> Any:
    try:
        return cloudpickle.loads(spec)
    except ModuleNotFoundError as error:
        error.add_note(
            f"the operator comes from a module that the workers cannot import ({error.name}): put"
            " it beside the program, install it, set PYTHONPATH, or send it along with"
            " ray.init(runtime_env={'working_dir': '.'}) before the trainer"
        )
        raise


# Any: Ray's annotations do not know concurrency groups. The handles of its actors are typed.
_remote: Any = ray.remote
RemoteWorkerActor: ActorClass[WorkerActor] = _remote(
    max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2, "files": 1, "relay": 2}
)(WorkerActor)
