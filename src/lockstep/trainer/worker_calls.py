# SPDX-License-Identifier: Apache-2.0
"""`WorkerCalls`: calls the workers of a trainer, one call at a time, until its `shutdown`."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lockstep.operator import TrainingOperator
from lockstep.trainer.refused_calls import (
    concurrent_call_error,
    no_local_operator_error,
    no_scheduler_error,
    shut_down_error,
    workers_ended_error,
)
from lockstep.trainer.shadow_summary import ShadowSummary
from lockstep.worker import Worker, run_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lockstep.engine import Engine
    from lockstep.engine.engine_protocol import CallListener
    from lockstep.worker import RemoteCall, StartReport, WorkerSpec

R = TypeVar("R")

_PATIENCE_S: Final = 1.0
"""How long a call waits for that of another thread, which may be a short one."""

_NAMES_IN_LOG: Final = {
    Worker.update_scheduler: "update_scheduler",
    Worker.call_with_operator: "apply_all_operators",
}
"""The methods whose calls the log of the run holds."""


class WorkerCalls:
    """Calls the workers' remote methods; raises the reason if the workers have ended.

    Args:
        note_change: called with the name of each call that changes the run otherwise than training,
            when nothing refuses it any more.

    Attributes:
        spec: the spec of the workers; `num_shards` and `seed` are those of a loaded state.
        is_open: `shutdown` has not begun to end the workers.
        shadow: what ``shadow_every`` has found.
        may_have_changed: a call since the latest training may have changed the state of the run.
    """

    def __init__(
        self, spec: WorkerSpec, engine: Engine, note_change: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.is_open = True
        self.shadow = ShadowSummary()
        self.may_have_changed = False
        self._engine = engine
        self._note_change = note_change
        self._calling = threading.Lock()
        self._caller: int | None = None  # the thread of the call that runs
        self._deferred: RemoteCall[Worker, Any] | None = None
        # A program may change between two calls what it holds itself, and nobody hears of it.
        self._is_held_by_program = (
            spec.num_workers == 1 and spec.operator_cls._lockstep_given is not None
        )

    def open_engine(self) -> Engine:
        """Undo an interrupted call, make a deferred one, and return the engine, ready for a call.

        Raises:
            TrainerClosedError: there are no workers any more.
        """
        if not self.is_open:
            raise shut_down_error()
        if self._engine.interrupted_by is not None:
            with self._one_call_at_a_time("a call"):
                self._engine.undo_interrupted_call()
        if self._engine.ended_by is not None:
            raise workers_ended_error(self._engine.ended_by, self.spec) from self._engine.ended_by
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            with self._one_call_at_a_time(deferred.contract.name):
                self._engine.call(deferred)
        return self._engine

    def defer(self, call: RemoteCall[Worker, Any]) -> None:
        """Make `call` before the next one, if there is one."""
        self._deferred = call

    def call(
        self,
        call: RemoteCall[Worker, R],
        *,
        listener: CallListener | None = None,
        retries: int = 3,
    ) -> list[R]:
        """See `Engine.call`."""
        engine = self.open_engine()
        with self._one_call_at_a_time(call.contract.name):
            # Noted first: a call that fails may have changed it, too.
            in_validation = engine.start_reports[0].changes_in_validation
            if call.is_training or call.may_change_state(in_validation=in_validation):
                self.may_have_changed = not call.is_training or self._is_held_by_program
            if (name := _NAMES_IN_LOG.get(call.method)) is not None:
                self._note_change(name)
            return engine.call(call, listener=listener, retries=retries)

    def call_rank_0(self, call: RemoteCall[Worker, R]) -> R:
        """See `Engine.call_rank`."""
        return self.call_rank(0, call)

    def call_rank(self, rank: int, call: RemoteCall[Worker, R]) -> R:
        """See `Engine.call_rank`."""
        engine = self.open_engine()
        with self._one_call_at_a_time(call.contract.name):
            return engine.call_rank(rank, call)

    @contextlib.contextmanager
    def _one_call_at_a_time(self, name: str) -> Iterator[None]:
        """Refuse a second call inside: both would use the same batches, model and metrics.

        A short call of another thread, as a `status` that it polls, is waited for.
        """
        is_within = self._caller == threading.get_ident()
        if not self._calling.acquire(timeout=0 if is_within else _PATIENCE_S):
            raise concurrent_call_error(name)
        try:
            self._caller = threading.get_ident()
            yield
        finally:
            self._caller = None
            self._calling.release()

    @property
    def start_reports(self) -> Sequence[StartReport]:
        """The result of each worker's `start`, by rank."""
        return self.open_engine().start_reports

    def refuse_without_schedulers(self) -> None:
        """Refuse a call that steps schedulers if there are none."""
        if not self.start_reports[0].has_schedulers:
            raise no_scheduler_error()

    def has_loader(self, purpose: str) -> bool:
        """Whether every worker registered a loader for `purpose`."""
        return all(purpose in worker.steps_per_epoch for worker in self.start_reports)

    def summary(self) -> dict[str, Any]:
        """See `TorchTrainer.status`."""
        epoch, finished, step = self.call_rank_0(run_counts.with_args())
        status = self.open_engine().status()
        return {
            "workers": status.workers,
            "spares": status.spares,
            "shards": self.spec.num_shards,
            "generation": status.generation,
            "epoch": epoch,
            "epochs_finished": finished,
            "step": step,
            "recoveries": list(status.recoveries),
            "units": list(self.start_reports[0].units),
            "shadow": self.shadow.as_dict(),
        }

    def local_operator(self) -> TrainingOperator | None:
        """The operator of rank 0, if rank 0 lives in this process."""
        return self.open_engine().local_operator()

    def required_local_operator(self) -> TrainingOperator:
        """The operator of rank 0 in this process, for a caller that may change it.

        Raises:
            ConfigurationError: rank 0 lives in another process.
        """
        operator = self.local_operator()
        if operator is None:
            raise no_local_operator_error()
        self.may_have_changed = self._is_held_by_program = True
        return operator

    def note_loaded(self, state: Mapping[str, Any]) -> None:
        """Note the `num_shards` and the `seed` of a state that was loaded."""
        before = self.spec
        num_shards = int(state.get("num_shards", before.num_shards))
        seed = int(state.get("seed", before.seed))
        self.spec = replace(before, num_shards=num_shards, seed=seed)
        self.open_engine().set_num_shards(num_shards)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the workers, or interrupted their latest call; None without one."""
        return self._engine.ended_by or self._engine.interrupted_by

    def settled_spec(self) -> WorkerSpec:
        """`spec`, for another trainer that is made of it while this one stays.

        An interrupted call is undone first: the workers of one are ended where others need room.
        """
        if self.is_open and not self.has_ended:
            self.open_engine()
        return self.spec

    @property
    def has_ended(self) -> bool:
        """Whether the workers have ended."""
        return self._engine.ended_by is not None

    def end(self, cause: BaseException) -> None:
        """End the workers, which cannot go on because of `cause`, unless they have ended."""
        if not self.has_ended:
            self._engine.end(cause)

    def begin_shutdown(self) -> bool:
        """Whether the workers are to be ended: False if they were already.

        Raises:
            WrongUseError: a call runs, whose workers would end below it.
        """
        if not self.is_open:
            return False
        with self._one_call_at_a_time("shutdown"):
            return True

    def end_operators(self) -> None:
        """Let each operator end what it has begun, before its worker ends."""
        end = self.spec.operator_cls._lockstep_end
        if end is not TrainingOperator._lockstep_end:
            self.call(Worker.call_with_operator.with_args(end))

    def refuse_calls(self) -> None:
        """Refuse all later calls, because the workers are about to end."""
        self.is_open = False

    def close(self, *, force: bool) -> None:
        """End the workers; every later call is refused. See `Engine.close`.

        Raises:
            WrongUseError: a call runs.
        """
        with self._one_call_at_a_time("shutdown"):
            self.refuse_calls()
            self._engine.close(force=force)
