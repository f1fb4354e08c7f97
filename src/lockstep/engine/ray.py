# SPDX-License-Identifier: Apache-2.0
"""Workers as plain Ray actors in a placement group; rank 0 in the driver if so asked.

Every actor answers with an `Outcome`, so a failure is a value until the driver has heard
enough to tell its cause: a survivor's broken connection often arrives before the error, or
the death, that broke it.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch.distributed as dist
from ray.exceptions import RayActorError

import ray
from lockstep.engine import placement
from lockstep.engine.base import COLLECTIVE_METHODS, METHODS_BESIDE
from lockstep.engine.cluster import connect, session
from lockstep.engine.crew import crew_for
from lockstep.engine.inline import every
from lockstep.engine.rendezvous import LOOPBACK, RendezvousStore
from lockstep.engine.travel import pickled, pickled_spec
from lockstep.errors import PeerLostError, WorkerDiedError
from lockstep.worker import Outcome, Rendezvous, Worker, add_rank, is_peer_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ray.util.placement_group import PlacementGroup

    from lockstep.engine import Resources
    from lockstep.operator import TrainingOperator
    from lockstep.worker import WorkerSpec

# Long enough for a cause to arrive after its consequence (measured: milliseconds apart).
_HEARING_S = 2.0
_STOP_S = 5.0
_WATCH_S = 0.2
_LOOK_S = 0.02


class RayEngine:
    """See `Engine`."""

    def __init__(self, spec: WorkerSpec, resources: Resources, *, use_local: bool) -> None:
        self._num_workers = spec.num_workers
        self.ended: BaseException | None = None
        self.started: list[dict[str, Any]] = []
        self._local: Worker | None = None
        self._actors: dict[int, Any] = {}
        # Filled only when every worker runs on this machine, where they can be waited for.
        self._pids: list[int] = []
        self._room: PlacementGroup | None = None
        self._store: RendezvousStore | None = None
        payload = pickled_spec(spec)
        own_cluster = connect()
        self._session = session()
        bundle = placement.bundle_for(resources.num_cpus, resources.num_gpus, resources.further)
        remote_ranks = range(1 if use_local else 0, spec.num_workers)
        try:
            crew = crew_for(bundle, remote_ranks, own_cluster)
            self._room, nodes = crew.room, list(crew.nodes)
            self._actors = dict(zip(remote_ranks, crew.actors, strict=True))
            if use_local:
                nodes.insert(0, _this_node())
                self._local = Worker(spec, 0, 0)
            shared = ray.put(payload)
            for rank, actor in self._actors.items():
                actor.enlist.remote(shared, placement.local_ranks(nodes)[rank])
            store = self._store = _open_store(nodes, resources.timeout_s)
            one_node = store.host == LOOPBACK
            rendezvous = Rendezvous(
                store.host,
                store.port,
                generation=0,
                backend=resources.backend,
                one_node=one_node,
                timeout_s=resources.timeout_s,
                as_default=not (use_local and dist.is_initialized()),
            )
            self.started = self.call("start", rendezvous if spec.num_workers > 1 else None)
        except BaseException as error:
            self.ended = self.ended or error
            self.close(force=True)
            raise
        if one_node:
            self._pids = [self.started[rank]["pid"] for rank in self._actors]

    # -------------------------------------------------------------------------------- calling

    def call(
        self, method: str, *args: Any, watch: Callable[[dict[str, Any]], None] | None = None
    ) -> list[Any]:
        return self._gather(method, args, range(self._num_workers), watch)

    def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        return self._gather(method, args, [rank], None)[0]

    def _gather(
        self,
        method: str,
        args: tuple[Any, ...],
        ranks: Sequence[int],
        watch: Callable[[dict[str, Any]], None] | None,
    ) -> list[Any]:
        arguments = pickled(args, f"an argument of {method}")
        if session() != self._session:
            # Asked before Ray is: it would start a new cluster to look for our actors there.
            self.ended = _session_over()
            self.close(force=True)
            raise self.ended
        hearing = _Hearing(method)
        try:
            shared = ray.put(arguments) if len(arguments) > 100_000 else arguments
            for rank in ranks:
                if rank in self._actors:
                    ref = self._actors[rank].perform.remote(method, shared)
                    hearing.pending[ref] = rank
            if self._local is not None and 0 in ranks:
                self._local.before_meeting = partial(self._wait_for_peers, hearing.pending)
                self._perform_locally(self._local, hearing, args, watch)
                watch = None
            hearing.listen(self._looker(watch))
            cause = hearing.cause()
            must_end = cause is not None and (
                method in COLLECTIVE_METHODS or bool(hearing.pending) or hearing.dead
            )
        except BaseException as error:
            # Ctrl-C most of all: nobody may be left behind in the middle of a step.
            self.ended = error
            self.close(force=True)
            raise
        if cause is None:
            return [hearing.values[rank] for rank in ranks]
        if must_end:
            self.ended = cause
            self.close(force=True)
        raise cause

    def _perform_locally(
        self,
        worker: Worker,
        hearing: _Hearing,
        args: tuple[Any, ...],
        watch: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        worker.on_commit = every(_WATCH_S, watch, worker)
        try:
            hearing.values[0] = getattr(worker, hearing.method)(*args)
        except Exception as error:
            if hearing.method in COLLECTIVE_METHODS:
                worker.leave()
            add_rank(error, 0)
            hearing.failed(error, peer_lost=is_peer_lost(error))
        finally:
            worker.on_commit = None

    def _wait_for_peers(self, pending: Mapping[Any, int]) -> None:
        """Rank 0 in this process joins the meeting only when the others stand at it.

        Once the ranks have met, one that fails closes its sockets and so frees the others.
        One that fails before would never come, and a wait inside gloo hears of nothing: no
        failure and no Ctrl-C.
        """
        assert self._store is not None
        while not self._store.have_come(0, pending.values()):
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=_LOOK_S)
            if any(map(_has_failed, ready)):
                raise PeerLostError(
                    "the ranks did not meet",
                    where=f"rank 0 of {self._num_workers}",
                    cause="another rank failed or died before it came",
                    fix="look for the first failure among the other ranks",
                )

    def _looker(self, watch: Callable[[dict[str, Any]], None] | None) -> Callable[[], None] | None:
        if watch is None or not self._actors:
            return None
        first = self._actors[min(self._actors)]

        def look() -> None:
            ref = first.progress.remote()
            ready, _ = ray.wait([ref], timeout=_WATCH_S)
            # A dead actor's progress is of no interest: its call says why.
            if ready:
                try:
                    watch(ray.get(ref))
                except RayActorError:
                    return

        return look

    # --------------------------------------------------------------------------------- ending

    def local_operator(self) -> TrainingOperator | None:
        return None if self._local is None else self._local.operator

    def close(self, *, force: bool) -> None:
        if session() != self._session:
            self._actors.clear()
            self._room = None
        if not force and self._actors:
            arguments = pickled((), "nothing")
            asked = [actor.perform.remote("stop", arguments) for actor in self._actors.values()]
            ray.wait(asked, num_returns=len(asked), timeout=_STOP_S)
        if self._local is not None:
            self._local.stop()
            self._local = None
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        room, self._room = self._room, None
        if room is not None:
            placement.release(room)
        _wait_until_gone(self._pids)
        self._pids = []
        if self._store is not None:
            self._store.close()


class _Hearing:
    """What the driver has heard from the ranks of one call, and what it makes of it."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.pending: dict[Any, int] = {}
        self.values: dict[int, Any] = {}
        self.dead = False
        self._causes: list[BaseException] = []
        self._consequences: list[BaseException] = []

    def heard(self, outcome: Outcome) -> None:
        error = outcome.exception()
        if error is None:
            self.values[outcome.rank] = cloudpickle.loads(outcome.value)
        else:
            self.failed(error, peer_lost=outcome.peer_lost)

    def failed(self, error: BaseException, *, peer_lost: bool) -> None:
        (self._consequences if peer_lost else self._causes).append(error)

    def listen(self, look: Callable[[], None] | None) -> None:
        """Until all have answered, or a cause is known, or a consequence waited long enough."""
        deadline: float | None = None
        while self.pending:
            if self._causes and (self.method in COLLECTIVE_METHODS or self.dead):
                return
            is_freed = self.method in METHODS_BESIDE and not self.dead
            if (self._causes or self._consequences) and deadline is None and not is_freed:
                deadline = time.monotonic() + _HEARING_S
            if deadline is not None and time.monotonic() > deadline:
                return
            timeout = _WATCH_S if look is not None or deadline is not None else None
            ready, _ = ray.wait(list(self.pending), num_returns=1, timeout=timeout)
            for ref in ready:
                self._answer(ref, self.pending.pop(ref))
            if look is not None and not ready:
                look()

    def _answer(self, ref: Any, rank: int) -> None:
        try:
            self.heard(ray.get(ref))
        except RayActorError as error:
            self.dead = True
            died = WorkerDiedError(
                f"the process of rank {rank} died during {self.method}",
                where=f"rank {rank}",
                cause=_first_lines(str(error)),
                fix="look for the reason above (out of memory? killed?), then build a new"
                " trainer and load the last checkpoint",
            )
            died.__cause__ = error
            self.failed(died, peer_lost=False)

    def cause(self) -> BaseException | None:
        return next(iter([*self._causes, *self._consequences]), None)


def _has_failed(ref: Any) -> bool:
    try:
        outcome: Outcome = ray.get(ref)
    # Whatever ended the actor or its call: the cause is sorted out where the call is heard.
    except Exception:
        return True
    return outcome.error is not None


def _first_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:count])


def _session_over() -> WorkerDiedError:
    return WorkerDiedError(
        "Ray was shut down, and this trainer's workers with it",
        cause="ray.shutdown() was called in this process",
        fix="create a new TorchTrainer; load(path) goes on from a checkpoint",
    )


def _this_node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _open_store(nodes: list[str], timeout_s: float) -> RendezvousStore:
    """On loopback if every rank is here; else on the address that the cluster knows us by."""
    here = set(nodes) == {_this_node()}
    host = LOOPBACK if here else ray.util.get_node_ip_address()
    return RendezvousStore(host, timeout_s)


def _wait_until_gone(pids: Iterable[int]) -> None:
    """`ray.kill` returns before the process has ended; nothing may outlive `shutdown`."""
    deadline = time.monotonic() + _STOP_S
    for pid in pids:
        while time.monotonic() < deadline:
            try:
                os.kill(pid, 0)
            except (ProcessLookupError, PermissionError):
                break
            time.sleep(0.01)
