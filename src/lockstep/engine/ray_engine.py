# SPDX-License-Identifier: Apache-2.0
"""`RayEngine`: workers as plain Ray actors in a placement group; with `use_local` rank 0 here.

Every actor answers with an `Outcome`: a failure is a value until the driver has received enough
answers to tell its cause (see `lockstep.engine.pending_call`).
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import ray
from lockstep.engine.background_poll import poll_in_background
from lockstep.engine.breakpoint_hook import without_ray_breakpoint_hook
from lockstep.engine.call_sending import send_call
from lockstep.engine.engine_protocol import PoolStatus
from lockstep.engine.inline_engine import progress_reporter
from lockstep.engine.keyboard_interrupt import reraise_keyboard_interrupt
from lockstep.engine.part_files import write_parts
from lockstep.engine.pending_call import POLL_EVERY_S, PendingCall
from lockstep.engine.ray_errors import ACTOR_DEATHS, has_failed
from lockstep.engine.sigint_after_step import sigint_after_step
from lockstep.engine.snapshot_fetcher import RemoteSnapshotFetcher
from lockstep.engine.step_hooks_at_work import step_hooks_at_work
from lockstep.engine.worker_group import WorkerGroup
from lockstep.error_texts import NEW_TRAINER
from lockstep.errors import PeerLostError, WorkerDiedError
from lockstep.operator import TrainingOperator
from lockstep.phases import Phase, in_phase
from lockstep.worker import (
    Communication,
    Worker,
    add_rank,
    is_peer_lost,
    status_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ray.actor import ActorProxy

    from lockstep.checkpoint import WrittenPart
    from lockstep.engine.engine_protocol import (
        CallListener,
        Resources,
        SnapshotFetcher,
        SnapshotKeeper,
    )
    from lockstep.engine.worker_actor import WorkerActor
    from lockstep.worker import Outcome, RemoteCall, StartReport, WorkerSpec
    from ray import ObjectRef

    Actor = ActorProxy[WorkerActor]

R = TypeVar("R")

_LAST_SNAPSHOT_S: Final = 2.0
_LAST_PARTS_S: Final = 60.0
"""How long workers that are to end may write their parts of a checkpoint; one of them may hang."""
_CHECK_ARRIVALS_S: Final = 0.02


class RayEngine:
    """An `Engine` that ends its workers when a rank fails in a collective call, or a call is
    interrupted.

    Attributes:
        workers: the processes of the workers.
        end_stopped_workers: see `Engine`.
    """

    def __init__(
        self, spec: WorkerSpec, resources: Resources, *, use_local: bool, num_spares: int
    ) -> None:
        self.spec = spec
        self.ended_by: BaseException | None = None
        self.start_reports: list[StartReport] = []
        self._fetcher: RemoteSnapshotFetcher | None = None
        self._keeper: SnapshotKeeper | None = None
        self.end_stopped_workers: Callable[[], None] = lambda: None
        self.workers = WorkerGroup(spec, resources, use_local=use_local, num_spares=num_spares)
        try:
            rendezvous = self.workers.open_rendezvous() if spec.num_workers > 1 else None
            self.start_reports = self.call(Worker.start.with_args(rendezvous))
            self.workers.await_spares()
        except BaseException as error:
            self.ended_by = self.ended_by or error
            self.close(force=True)
            raise
        self.workers.note_started(self.start_reports)

    # -------------------------------------------------------------------------------- calling

    def call(
        self,
        call: RemoteCall[Worker, R],
        *,
        listener: CallListener | None = None,
        retries: int = 0,
    ) -> list[R]:
        calls = dict.fromkeys(range(len(self.workers.members)), call)
        return self.results(self.perform(calls, listener=listener))

    def call_rank(self, rank: int, call: RemoteCall[Worker, R]) -> R:
        return self.results(self.perform({rank: call}))[0]

    def results(self, pending_call: PendingCall[R]) -> list[R]:
        """The values by rank; on a failure end workers that cannot go on, and raise the cause."""
        cause = pending_call.cause()
        if cause is None:
            return [pending_call.values[rank] for rank in sorted(pending_call.values)]
        communication = pending_call.contract.communication
        is_collective = communication is Communication.RUN_GROUP
        may_hang = bool(pending_call.performing) and not self._finishes_alone(communication)
        if is_collective or may_hang or pending_call.deaths:
            self.end(cause)
        raise cause

    def _finishes_alone(self, communication: Communication) -> bool:
        """Whether a rank still running this call returns without its peers, so that one failed rank
        need not end the others."""
        has_shards, operator_cls = self.spec.options.sync == "fsdp", self.spec.operator_cls
        if communication is Communication.SHARDED_STATE:
            return not has_shards
        if communication is Communication.OWN_STATE:
            return not (
                has_shards and operator_cls._lockstep_overrides(TrainingOperator.state_dict)
            )
        return communication is Communication.NONE

    @property
    def interrupted_by(self) -> BaseException | None:
        """Always None: this engine cannot re-create its process group, so it ends its workers when
        a call is interrupted."""
        return None

    def undo_interrupted_call(self) -> None:
        """Does nothing; see `interrupted_by`."""

    def end(self, cause: BaseException) -> None:
        """End all workers because of `cause`."""
        self.ended_by = cause
        try:
            self.fetch_last_snapshot(cause)
        finally:
            self.close(force=True)

    def fetch_last_snapshot(self, cause: BaseException) -> None:
        """Fetch the newest snapshot that rank 0 took before the failure; wait at most
        `_LAST_SNAPSHOT_S` for each answer."""
        if (
            self._fetcher is not None
            and isinstance(cause, Exception)
            and self.workers.is_in_session
        ):
            self._fetcher.finish(_LAST_SNAPSHOT_S)

    def perform(
        self,
        calls: Mapping[int, RemoteCall[Worker, R]],
        *,
        listener: CallListener | None = None,
        on_poll: Callable[[PendingCall[R]], None] | None = None,
        on_interrupt: Callable[[BaseException], None] | None = None,
    ) -> PendingCall[R]:
        """Let ranks perform a remote method, and wait for their answers, or for a failure.

        Args:
            calls: the call of each rank, all of the same method.
            listener: see `Engine.call`.
            on_poll: called several times a second meanwhile. With it, the call outlives the death
                of a worker.
            on_interrupt: called if the driver stops waiting in the middle, on Ctrl-C for example;
                if None, the workers are ended.
        """
        self._check_session()
        call = next(iter(calls.values()))
        pending_call: PendingCall[R] = PendingCall(
            call.contract, self.workers.server, outlives_deaths=on_poll is not None
        )
        if self._fetcher is not None:
            self._fetcher.on_call_start()
        local = self.workers.members[0].worker if 0 in calls else None
        has_begun_here = False
        try:
            workers = self.workers
            send_call(calls, workers.members, pending_call, workers.ranks_per_relay)
            if local is not None:
                has_begun_here = True
                self._perform_in_driver(local, calls[0], pending_call, listener, on_poll)
                listener = None  # the worker in this process has reported its progress
            fetcher = self._fetcher if call.is_training else None
            pending_call.wait(self._poll(pending_call, listener, on_poll, fetcher))
        except BaseException as error:
            # No worker may go on in the middle of a step without a driver that waits for it.
            if pending_call.performing or has_begun_here:
                (on_interrupt or self.end)(error)
            raise
        return pending_call

    def _perform_in_driver(
        self,
        worker: Worker,
        call: RemoteCall[Worker, R],
        pending_call: PendingCall[R],
        listener: CallListener | None,
        on_poll: Callable[[PendingCall[R]], None] | None,
    ) -> None:
        """Perform `call` on rank 0 in this process, while actors perform it on other ranks."""
        worker.before_first_collective = partial(self._wait_for_peers, pending_call.pending)
        worker.on_commit = progress_reporter(worker, listener, POLL_EVERY_S)
        pending_call.local_status = partial(status_of, worker, threading.get_ident())
        polling = (
            nullcontext() if on_poll is None else poll_in_background(partial(on_poll, pending_call))
        )
        with polling, step_hooks_at_work(worker), sigint_after_step(worker):
            try:
                with without_ray_breakpoint_hook():
                    pending_call.values[0] = call.perform(worker)
            except Exception as error:
                if call.contract.communication is Communication.RUN_GROUP:
                    worker.leave()
                add_rank(error, 0)
                pending_call.fail(0, error, peer_lost=is_peer_lost(error))
            finally:
                worker.on_commit = None
        pending_call.local_status = None

    def _check_session(self) -> None:
        # First: Ray would start a new cluster to look for our actors there.
        if not self.workers.is_in_session:
            over = _session_over_error()
            self.end(over)
            raise over

    @reraise_keyboard_interrupt()
    @in_phase(Phase.WAITING)
    def _wait_for_peers(self, pending: Mapping[ObjectRef[Outcome], int]) -> None:
        """Block until all other ranks have arrived at the rendezvous; then rank 0 here may join it.

        After the rendezvous, a rank that fails closes its sockets and so frees the others. A rank
        that fails before it never arrives, and a wait inside gloo notices neither its failure nor
        Ctrl-C.

        Raises:
            PeerLostError: a rank failed, or did not come within `timeout_s`.
        """
        deadline = time.monotonic() + self.workers.timeout_s
        while missing := self.workers.ranks_to_arrive(pending.values()):
            if time.monotonic() > deadline:
                raise _not_arrived_error(missing, self.workers)
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=_CHECK_ARRIVALS_S)
            if any(map(has_failed, ready)):
                raise PeerLostError(
                    "the ranks did not meet",
                    where=f"rank 0 of {len(self.workers.members)}",
                    cause="another rank failed or died before it came",
                    fix="look for the first failure among the other ranks",
                )

    def _poll(
        self,
        pending_call: PendingCall[R],
        listener: CallListener | None,
        on_poll: Callable[[PendingCall[R]], None] | None,
        fetcher: RemoteSnapshotFetcher | None,
    ) -> Callable[[], None] | None:
        """A function to call between waits while the ranks perform; None if there is none."""
        actors = [member.actor for member in self.workers.members if member.actor is not None]
        if on_poll is None and fetcher is None and (listener is None or not actors):
            return None

        wants_rows = bool(self.spec.log_every) and len(actors) == len(self.workers.members)

        def poll() -> None:
            if listener is not None and actors:
                _report_progress(actors, listener, wants_rows)
            if on_poll is not None:
                on_poll(pending_call)
            if fetcher is not None:
                fetcher.poll()

        return poll

    def start_snapshot_fetcher(self, to: SnapshotKeeper) -> SnapshotFetcher:
        self._keeper = to
        rank_0, end_stopped_workers = lambda: self.workers.rank_0, self.end_stopped_workers
        self._fetcher = RemoteSnapshotFetcher(rank_0, to, end_stopped_workers)
        return self._fetcher

    def write_parts(self, step: int, folder: str) -> list[WrittenPart] | None:
        return write_parts(self.workers.members, step, folder, self.end_stopped_workers)

    # --------------------------------------------------------------------------------- ending

    def local_operator(self) -> TrainingOperator | None:
        first = self.workers.rank_0
        return None if first is None or first.worker is None else first.worker.operator

    def set_num_shards(self, num_shards: int) -> None:
        self.spec = replace(self.spec, num_shards=num_shards)

    def status(self) -> PoolStatus:
        return PoolStatus(workers=len(self.workers.members), spares=len(self.workers.spares))

    def close(self, *, force: bool) -> None:
        try:
            # The workers write their parts of the latest checkpoint, which would be lost with them.
            if self._keeper is not None and self.spec.saves_parts and self.workers.is_in_session:
                self._keeper.finish_writing(_LAST_PARTS_S)
        finally:
            self.workers.close(force=force)


def _not_arrived_error(missing: Sequence[int], workers: WorkerGroup) -> PeerLostError:
    numbers = ", ".join(map(str, missing))
    return PeerLostError(
        f"rank {numbers} did not come to the other ranks within timeout_s={workers.timeout_s:g}",
        where=f"rank 0 of {len(workers.members)}",
        cause="its initialization_hook hangs, or takes longer; or its process does not start",
        fix="look at what that process does (py-spy dump); if it is slow, a larger timeout_s",
    )


def _report_progress(actors: Sequence[Actor], listener: CallListener, wants_rows: bool) -> None:
    """Report rank 0's progress to `listener`, and all ranks' new rows if it `wants_rows`."""
    asked = actors[0].progress.remote()
    rows = [each.step_rows.remote(listener.rows_known) for each in actors] if wants_rows else []
    wanted: list[ObjectRef[Any]] = [asked, *rows]
    ready, _ = ray.wait(wanted, num_returns=len(wanted), timeout=POLL_EVERY_S)
    # The pending call of an actor that died reports the death.
    with suppress(*ACTOR_DEATHS):
        if len(ready) == len(wanted):
            progress = ray.get(asked)
            listener.on_progress(replace(progress, rows=ray.get(rows)) if wants_rows else progress)


def _session_over_error() -> WorkerDiedError:
    return WorkerDiedError(
        "Ray was shut down, and this trainer's workers with it",
        cause="ray.shutdown() was called in this process",
        fix=NEW_TRAINER,
    )
