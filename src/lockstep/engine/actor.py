# SPDX-License-Identifier: Apache-2.0
"""The process around one worker. Light to import: importing torch is most of a launch."""

from __future__ import annotations

import gc
import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import cloudpickle

import ray
from lockstep.engine.actor_bootstrap import settle_in
from lockstep.engine.base import COLLECTIVE_METHODS

if TYPE_CHECKING:
    from lockstep.worker import Outcome, Worker, WorkerStatus


class WorkerActor:
    """Answers with an `Outcome`, never with an exception.

    What looks after the worker while it performs something has a lane of its own.
    """

    def __init__(self, rank: int) -> None:
        settle_in("lockstep.worker")
        self._spec = b""
        self._rank = rank
        self._local_rank = 0
        self._worker: Worker | None = None
        self._thread = 0

    def __repr__(self) -> str:
        # Ray puts this before every line that the process prints.
        return f"rank {self._rank}"

    def enlist(self, spec: bytes, rank: int, local_rank: int) -> None:
        """Learn what to be a worker of; comes before the first `perform`."""
        self._spec, self._rank, self._local_rank = spec, rank, local_rank

    @ray.method(concurrency_group="control")
    def alive(self) -> Outcome:
        """Answers where a process lives, whatever it is doing."""
        from lockstep.serialization import pickled
        from lockstep.worker import Outcome

        return Outcome(pickled(None, "nothing"))

    @ray.method(concurrency_group="control")
    def node(self) -> str:
        """The node that it runs on."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def perform(self, method: str, arguments: bytes) -> Outcome:
        from lockstep.serialization import pickled
        from lockstep.worker import Outcome, Worker, failure

        self._thread = threading.get_ident()
        try:
            if self._worker is None:
                self._worker = Worker(_loaded(self._spec), self._rank, self._local_rank)
            value = getattr(self._worker, method)(*cloudpickle.loads(arguments))
            self._rank = self._worker.rank
            if method == "stop":
                self._retire()
            # Pickled here, so that a result that cannot travel is an error of this call.
            return Outcome(pickled(value, "what the worker returned"))
        except BaseException as error:
            # The peers wait for this rank in a collective: closing the sockets frees them.
            if method in COLLECTIVE_METHODS and self._worker is not None:
                self._worker.leave()
            return failure(self._rank, error)

    def _retire(self) -> None:
        """Ready for another trainer, with nothing of this one's but what its modules hold."""
        self._worker, self._spec = None, b""
        gc.collect()

    @ray.method(concurrency_group="control")
    def progress(self) -> dict[str, Any]:
        return {} if self._worker is None else self._worker.progress()

    @ray.method(concurrency_group="control")
    def step_rows(self, since: int) -> tuple[int, list[Any]]:
        return (0, []) if self._worker is None else self._worker.step_rows(since)

    @ray.method(concurrency_group="control")
    def where(self) -> WorkerStatus | None:
        return None if self._worker is None else self._worker.where(self._thread)

    @ray.method(concurrency_group="control")
    def dismiss(self) -> None:
        if self._worker is not None:
            self._worker.dismiss()

    @ray.method(concurrency_group="control")
    def break_group(self, generation: int) -> None:
        if self._worker is not None:
            self._worker.break_group(generation)

    @ray.method(concurrency_group="control")
    def snapshot(self, is_requested: bool) -> tuple[int, bytes, list[Any]] | None:
        """The latest copy of the run's state that nobody has had yet, in pieces.

        Args:
            is_requested: have one made before the next batch.
        """
        from lockstep.serialization import split

        if self._worker is None:
            return None
        if is_requested:
            self._worker.snapshots.request()
        snapshot = self._worker.snapshots.take()
        if snapshot is None:
            return None
        structure, buffers = split(snapshot.state)
        # As arrays, which Ray puts into its store, and maps on the other side, without a pickle.
        return snapshot.step, structure, [buffer.numpy() for buffer in buffers]

    @ray.method(concurrency_group="control")
    def end_process(self, pid: int) -> None:
        """End another process on this node."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _loaded(spec: bytes) -> Any:
    try:
        return cloudpickle.loads(spec)
    except ModuleNotFoundError as error:
        error.add_note(
            f"the operator comes from a module that the workers cannot import ({error.name}): put"
            " it beside the program, install it, set PYTHONPATH, or send it along with"
            " ray.init(runtime_env={'working_dir': '.'}) before the trainer"
        )
        raise


# Any: Ray's annotations do not know concurrency groups.
_make_actor: Any = ray.remote
RemoteWorker = _make_actor(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})(
    WorkerActor
)
