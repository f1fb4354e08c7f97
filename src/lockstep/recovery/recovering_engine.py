# SPDX-License-Identifier: Apache-2.0
"""`RecoveringEngine`: calls on all workers that go on when a worker dies or hangs.

Design note. `RayEngine.perform` runs one attempt of a call and returns its answers and failures;
this engine decides what follows, by the `CallContract` of the remote method:

- All ranks answered: the call returns their results, and a report for each worker that was lost.
- A worker died (or only lost its peers): `Regrouping.run` forms the next generation. A loop then
  resumes where the furthest survivor stands (RESUME), a call that changes nothing is made again
  (REPEAT, REPEAT_WRITE), and any other one raises: it may have happened on some workers (RAISE).
- The user's code failed, and all workers live: the error arrives at once. The workers are *left*:
  asked to leave before their next batch, their group broken so that no rank waits. They are taken
  back to the last committed step by `undo_interrupted_call` when the next call comes, and not
  before: a rank may be in a forward that takes minutes. Ctrl-C in the driver ends a call likewise.
- Anything else ends the workers, and `ended_by` says why.

While ranks perform, `_on_poll` runs several times a second: the watchdog ends a rank that hangs,
and replacements start for workers that were lost. When a spare is ready and a rank is vacant, all
members are asked to leave the group before their next batch; the group then forms anew, with the
spare.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from lockstep.data import shards_of
from lockstep.engine.idle_worker_eviction import evicted_error, register_for_eviction
from lockstep.engine.rollback_errors import warn_of_cut_short_step
from lockstep.error_texts import GO_ON
from lockstep.errors import NotShardableError, PoisonedStepError, WorkerDiedError
from lockstep.operator import TrainingOperator
from lockstep.recovery.call_errors import lost_changes_error, partial_call_error
from lockstep.recovery.incident import Incident
from lockstep.recovery.lost_sample_counts import LostSampleCounts
from lockstep.recovery.lost_worker import LostWorker
from lockstep.recovery.regrouping import Regrouping
from lockstep.recovery.watchdog import Watchdog
from lockstep.worker import (
    Communication,
    OnFailure,
    Worker,
    items_ahead,
    renew_memory_checkpoint,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.checkpoint import WrittenPart
    from lockstep.engine import PoolStatus
    from lockstep.engine.engine_protocol import CallListener, SnapshotFetcher, SnapshotKeeper
    from lockstep.engine.pending_call import PendingCall
    from lockstep.engine.ray_engine import RayEngine
    from lockstep.recovery.regrouping import NewGeneration
    from lockstep.worker import RemoteCall, RunPosition, StartReport

R = TypeVar("R")

_log = logging.getLogger("lockstep.recovery")

_MAX_DEATHS: Final = 3
"""Deaths that one shard of one step may cause: the first worker and two replacements."""


class RecoveringEngine:
    """An `Engine` that forms a new process group when the present one breaks.

    Args:
        engine: starts the workers, and performs single attempts of calls.
        min_workers: the fewest workers with which the run goes on.
        hang_timeout_s: how long a worker may stay at one step while others wait for it.

    Attributes:
        workers: the processes of the workers.
    """

    def __init__(self, engine: RayEngine, min_workers: int, hang_timeout_s: float) -> None:
        self.interrupted_by: BaseException | None = None
        self._engine = engine
        self.workers = engine.workers
        limit = engine.spec.options.shadow_limit
        self._watchdog = Watchdog(engine.workers, hang_timeout_s, limit)
        self.end_stopped_workers = engine.end_stopped_workers = self._watchdog.end_stopped_workers
        self._regrouping = Regrouping(engine, min_workers, self._watchdog)
        self._incidents: list[Incident] = []
        self._has_asked_to_leave = False
        self._reads_dataset = False
        self._to_replace: list[LostWorker] = []
        self._interrupted: RemoteCall[Worker, object] | None = None
        # Never True again: steps computed by fewer workers stay in the weights.
        self._has_same_bits = True
        self._hosts_at_start = engine.workers.hosts

    @property
    def ended_by(self) -> BaseException | None:
        return self._engine.ended_by

    @property
    def start_reports(self) -> list[StartReport]:
        return self._engine.start_reports

    def local_operator(self) -> TrainingOperator | None:
        return self._engine.local_operator()

    def start_snapshot_fetcher(self, to: SnapshotKeeper) -> SnapshotFetcher:
        self._regrouping.checkpoints = to
        return self._engine.start_snapshot_fetcher(to)

    def write_parts(self, step: int, folder: str) -> list[WrittenPart] | None:
        return self._engine.write_parts(step, folder)

    def end(self, cause: BaseException) -> None:
        self._engine.end(cause)

    def close(self, *, force: bool) -> None:
        # An interrupted worker may be in the middle of a step for long.
        was_interrupted = self.interrupted_by is not None
        self.interrupted_by = None  # close() releases the resources: no eviction afterwards
        self._engine.close(force=force or was_interrupted)

    def set_num_shards(self, num_shards: int) -> None:
        self._engine.set_num_shards(num_shards)

    def status(self) -> PoolStatus:
        return replace(
            self._engine.status(),
            generation=self.workers.generation,
            spares=len(self._regrouping.spares.ready_workers()),
            recoveries=[incident.as_dict() for incident in self._incidents],
        )

    # ---------------------------------------------------------------------------- calling

    def call(
        self,
        call: RemoteCall[Worker, R],
        *,
        listener: CallListener | None = None,
        retries: int = 3,
    ) -> list[R]:
        return self._call(call, None, listener, retries)

    def call_rank(self, rank: int, call: RemoteCall[Worker, R]) -> R:
        return self._call(call, rank, None, 3)[0]

    def _call(
        self,
        call: RemoteCall[Worker, R],
        rank: int | None,
        listener: CallListener | None,
        retries: int,
    ) -> list[R]:
        # Anew in each call: several validations after one step of training begin at the same step.
        deaths: Counter[tuple[RunPosition, int]] = Counter()
        if call.method is Worker.feed:
            self._reads_dataset = call.args[0] is not None
        self._regroup_before_call(call)
        lost_counts = LostSampleCounts(
            self._engine,
            self._watchdog,
            call.purpose,
            lambda question: self._ask(call, question),
        )
        attempt, left = call, retries
        while True:
            pending_call = self._perform(attempt, rank, listener)
            self._replace_lost()
            if not pending_call.has_failed:
                self._renew_memory_checkpoint(call)
                # Only loops have lost reports, and R is Report then.
                return [*self._engine.results(pending_call), *cast("list[R]", lost_counts.reports)]
            # Members that were asked to leave for a newcomer have not failed.
            may_go_on = pending_call.is_recoverable or self._asks_for_all_workers(
                call, pending_call
            )
            left -= 0 if self._has_asked_to_leave and not pending_call.deaths else 1
            if not may_go_on or left < 0:
                if pending_call.is_recoverable:
                    _add_retries_note(pending_call.cause(), call.contract.name, retries)
                self._interrupt_if_all_live(call, pending_call)
                is_over = not pending_call.performing  # else a renewal would wait for those ranks
                if is_over and not pending_call.deaths and not pending_call.is_recoverable:
                    self._renew_memory_checkpoint(call)
                return self._engine.results(pending_call)
            new_generation = self._recover(call, pending_call)
            if self._knows_fatal_step(call):
                self._refuse_poisoned_batch(call, new_generation, deaths)
            lost_counts.record_losses(new_generation)
            if call.contract.on_failure is OnFailure.RAISE:
                self._replace_lost()
                raise partial_call_error(pending_call, new_generation)
            progress = new_generation.source.progress
            if call.contract.on_failure is OnFailure.RESUME and progress is not None:
                attempt = call.resume_at(progress)

    def _asks_for_all_workers(
        self, call: RemoteCall[Worker, object], pending_call: PendingCall[Any]
    ) -> bool:
        """Whether a loop goes on with replacements for all lost workers, and not without them.

        A loop that takes plain batches reads all shards of a worker as one batch. The shards that a
        survivor has taken over may not become one: ready batches of different widths.
        """
        is_short = len(self.workers.members) < self._engine.spec.num_workers
        is_loop = call.contract.on_failure is OnFailure.RESUME
        if not (is_short and is_loop and isinstance(pending_call.cause(), NotShardableError)):
            return False
        self._regrouping.require_all_workers()
        self._has_asked_to_leave = True
        self._regrouping.request_leave()
        self.workers.break_group(range(len(self.workers.members)))
        return True

    def _renew_memory_checkpoint(self, call: RemoteCall[Worker, object]) -> None:
        """After a call that may have changed the state by other means than training.

        Raises:
            WorkerDiedError: a worker died meanwhile, and the others have gone back to the state
                from before the call.
        """
        if not self._engine.spec.keeps_memory_checkpoints:
            return
        in_validation = self.start_reports[0].changes_in_validation
        if not call.may_change_state(in_validation=in_validation):
            return
        # Not by `_call`, which may form the group anew before, and so lose what has changed.
        renewal = renew_memory_checkpoint.with_args()
        pending_call = self._perform(renewal, None, None)
        if not pending_call.has_failed:
            return
        if not pending_call.is_recoverable:
            self._engine.results(pending_call)
        self._recover(renewal, pending_call)
        self._replace_lost()
        raise lost_changes_error(call.contract.name, pending_call)

    def _perform(
        self, call: RemoteCall[Worker, R], rank: int | None, listener: CallListener | None
    ) -> PendingCall[R]:
        self._watchdog.begin_call()
        self._has_asked_to_leave = False
        if listener is not None:
            listener.on_attempt(len(self.workers.members), len(self._incidents))
        ranks = range(len(self.workers.members)) if rank is None else [rank]
        return self._engine.perform(
            dict.fromkeys(ranks, call),
            listener=listener,
            on_poll=partial(self._on_poll, call),
            on_interrupt=partial(self._interrupt, call),
        )

    def _ask(self, call: RemoteCall[Worker, object], question: RemoteCall[Worker, R]) -> R | None:
        """Between two attempts of `call`, ask all workers what each of them can answer.

        Returns:
            None if no worker answers. The next attempt finds those that died, and recovers.
        """
        self._watchdog.begin_call()
        pending_call = self._engine.perform(
            dict.fromkeys(range(len(self.workers.members)), question),
            on_poll=self._watchdog.poll,
            on_interrupt=partial(self._interrupt, call),
        )
        if not pending_call.is_recoverable:
            self._engine.results(pending_call)
        return next(iter(pending_call.values.values()), None)

    def _on_poll(self, call: RemoteCall[Worker, object], pending_call: PendingCall[Any]) -> None:
        self._replace_lost()
        self._watchdog.poll(pending_call)
        if call.contract.communication is Communication.OWN_GROUP and pending_call.deaths:
            # A worker died after the ping: the others wait for it at the rendezvous.
            self.workers.close_rendezvous()
        if call.is_training and not self._has_asked_to_leave and self._can_grow(call):
            # Members leave before their next batch; a rank still in a step then fails in it.
            self._has_asked_to_leave = True
            self._regrouping.request_leave()

    def _regroup_before_call(self, call: RemoteCall[Worker, object]) -> None:
        """Before a call, form the group anew if a worker died or a spare can take a free rank."""
        # In a rendezvous no rank notices that another one is dead: all of them must live.
        forms_group = call.contract.communication is Communication.OWN_GROUP
        may_fail = call.contract.may_be_repeated and not forms_group
        if may_fail and not self._can_grow(call):
            return
        ping = Worker.ping.with_args()
        pending_call = self._perform(ping, None, None)
        if pending_call.deaths or self._can_grow(call):
            self._recover(ping, pending_call)

    def _can_grow(self, call: RemoteCall[Worker, object]) -> bool:
        # A newcomer has no stream of a dataset of Ray's. It joins at a ping, after which the
        # dataset is split anew; under fsdp never, because steps on those rows would come again.
        keeps_memory_checkpoints = self._engine.spec.keeps_memory_checkpoints
        if self._reads_dataset and (keeps_memory_checkpoints or call.method is not Worker.ping):
            return False
        return self._regrouping.can_grow

    # ------------------------------------------------------------------------ interrupting

    def _interrupt_if_all_live(
        self, call: RemoteCall[Worker, object], pending_call: PendingCall[Any]
    ) -> None:
        """If all workers live after a failure of the user's code, interrupt a loop, and ranks that
        still perform a call which changes nothing: the next call would wait for them.

        Raises:
            The failure; the workers and the parameter server live on.
        """
        cause, on_failure = pending_call.cause(), call.contract.on_failure
        if cause is None or pending_call.deaths or isinstance(cause, WorkerDiedError):
            return
        still_performs = on_failure is OnFailure.REPEAT and bool(pending_call.performing)
        if on_failure is OnFailure.RESUME or still_performs:
            self._interrupt(call, cause)
            raise cause

    def _interrupt(self, call: RemoteCall[Worker, object], error: BaseException) -> None:
        """Leave the workers in the middle of `call`, and free ranks that wait for others in it.

        Does not wait for workers: the error arrives at once, and `undo_interrupted_call` rolls the
        workers back when there is a next call.
        """
        is_interruption = isinstance(error, Exception | KeyboardInterrupt)
        if not call.contract.may_be_interrupted or not is_interruption:
            self._engine.end(error)
            return
        self.interrupted_by, self._interrupted = error, call
        self._regrouping.request_leave()
        self.workers.break_group(range(len(self.workers.members)))
        self._engine.fetch_last_snapshot(error)
        register_for_eviction(self)

    def evict_workers(self) -> None:
        """End the workers if no call has come since the interrupted one."""
        cause, self.interrupted_by = self.interrupted_by, None
        if cause is not None:
            ended = evicted_error(cause)
            _log.warning("%s; the next time: %s", ended.what, ended.details["fix"])
            self._engine.end(ended)

    def undo_interrupted_call(self) -> None:
        cause, call, began = self.interrupted_by, self._interrupted, time.monotonic()
        if cause is None or call is None:
            return
        try:
            new_generation = self._regrouping.run(call.request, [], abandoned_because=cause)
        except Exception as error:  # a step that is computed again runs the user's code
            error.__cause__ = error.__cause__ or cause
            self._engine.end(error)
        else:
            # A worker may have died since the call was interrupted: record that like any loss.
            seconds = time.monotonic() - began
            self._record_recovery(call.contract.name, new_generation, seconds, has_failed=False)
            self._to_replace += new_generation.lost_workers
            if new_generation.source.is_cut_short:
                warn_of_cut_short_step(new_generation.position.steps, cause)
        self.interrupted_by = None

    # ------------------------------------------------------------------------- recovering

    def _recover(
        self, call: RemoteCall[Worker, object], pending_call: PendingCall[Any]
    ) -> NewGeneration:
        """Form the group anew after a failure of `call`, or for a spare."""
        began = pending_call.failed_at or time.monotonic()
        try:
            new_generation = self._regrouping.run(call.request, self._lost_workers(pending_call))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._interrupt(call, error)
            else:
                self._engine.end(error)
            raise
        seconds, name = time.monotonic() - began, pending_call.contract.name
        self._record_recovery(name, new_generation, seconds, has_failed=pending_call.has_failed)
        self._to_replace += new_generation.lost_workers
        return new_generation

    def _replace_lost(self) -> None:
        """Start replacements for lost workers.

        Not in the recovery itself: a process that starts takes CPU time from the step that all
        other workers wait for.
        """
        lost_workers, self._to_replace = self._to_replace, []
        self._regrouping.spares.start_replacements(lost_workers)

    def _lost_workers(self, pending_call: PendingCall[Any]) -> list[LostWorker]:
        members, num_shards = list(self.workers.members), self._engine.spec.num_shards
        return [
            LostWorker(
                members[rank],
                rank,
                shards_of(rank, len(members), num_shards),
                died,
                self._watchdog.last_seen(members[rank]),
            )
            for rank, died in pending_call.deaths.items()
        ]

    def _record_recovery(
        self, name: str, new_generation: NewGeneration, seconds: float, *, has_failed: bool
    ) -> None:
        """Log a recovery in the call of the method `name`, and record the incident."""
        lost_workers, spec = new_generation.lost_workers, self._engine.spec
        generation, size = self.workers.generation, len(self.workers.members)
        is_whole = size == spec.num_workers and self.workers.hosts == self._hosts_at_start
        self._has_same_bits &= spec.options.reproducible or is_whole
        if not lost_workers and (self._has_asked_to_leave or not has_failed):
            _log.info("generation %d has %d workers", generation, size)
            return
        progress, restore = new_generation.source.progress, new_generation.restore
        incident = Incident(
            at=time.time(),
            lost=tuple(f"{each.worker}, rank {each.rank}" for each in lost_workers),
            why="; ".join(self._loss_reason(each) for each in lost_workers)
            or "the connections broke",
            during=_describe_call(name, lost_workers),
            step=new_generation.position.steps,
            replayed=(0 if restore is None else restore.steps)
            + int(progress is not None and not progress.is_over),
            seconds=seconds,
            generation=generation,
            workers=size,
            same_bits=self._has_same_bits,
            checkpoint=None if restore is None else restore.directory,
        )
        self._incidents.append(incident)
        _log.warning("%s", incident)

    def _loss_reason(self, lost: LostWorker) -> str:
        return self._watchdog.verdicts.get(lost.worker) or lost.died.details["cause"] or "died"

    def _knows_fatal_step(self, call: RemoteCall[Worker, object]) -> bool:
        """Whether survivors of `call` stand at the step in which a lost worker died.

        Ranks validate without waiting for each other, and a `train_epoch` of the user's own goes
        back to its beginning: nobody knows then which samples the lost worker had.
        """
        has_own_epoch = self._engine.spec.operator_cls._lockstep_overrides(
            TrainingOperator.train_epoch
        )
        return call.is_training and not has_own_epoch

    def _refuse_poisoned_batch(
        self,
        call: RemoteCall[Worker, object],
        new_generation: NewGeneration,
        deaths: Counter[tuple[RunPosition, int]],
    ) -> None:
        """Count the deaths by step and shard; end a run whose next batch kills each worker."""
        step = new_generation.position
        for each in new_generation.lost_workers:
            deaths.update((step, shard) for shard in each.shards)
            fatal = [shard for shard in each.shards if deaths[step, shard] >= _MAX_DEATHS]
            if fatal:
                error = self._poisoned_step_error(call, fatal, new_generation, each)
                self._engine.end(error)
                raise error

    def _poisoned_step_error(
        self,
        call: RemoteCall[Worker, object],
        shards: Sequence[int],
        new_generation: NewGeneration,
        lost: LostWorker,
    ) -> PoisonedStepError:
        items = self._ask(call, items_ahead.with_args("train", shards))
        return PoisonedStepError(
            "the same samples have ended the worker that computed them, and two in its place",
            where=f"step {new_generation.position.steps + 1}, shard {', '.join(map(str, shards))}",
            got=f"samples {items}" if items else None,
            cause=self._loss_reason(lost),
            fix="look at these samples (too large for the memory? a crash in native code?), leave"
            f" them out, and {GO_ON}",
        )


def _describe_call(name: str, lost_workers: Sequence[LostWorker]) -> str:
    phases = [seen.phase.value for each in lost_workers if (seen := each.last_seen) is not None]
    return f"{name} ({', '.join(phases)})" if phases else name


def _add_retries_note(cause: BaseException | None, name: str, retries: int) -> None:
    if cause is not None:
        cause.add_note(
            f"workers were lost {retries + 1} times in this call: max_retries={retries} is"
            f" used up; {name}(max_retries=...) allows more"
        )
