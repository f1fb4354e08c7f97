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

import torch.distributed as dist
from ray.exceptions import RayActorError

import ray
from lockstep.engine import placement
from lockstep.engine.base import COLLECTIVE_METHODS
from lockstep.engine.cluster import connect, session
from lockstep.engine.crew import come_back, crew_for, send_home
from lockstep.engine.hearing import WATCH_S, Hearing
from lockstep.engine.inline import every
from lockstep.engine.rendezvous import LOOPBACK, RendezvousStore
from lockstep.engine.server import ServerProcess
from lockstep.engine.travel import pickled, pickled_spec
from lockstep.errors import PeerLostError, WorkerDiedError
from lockstep.worker import Outcome, Rendezvous, Worker, add_rank, is_peer_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lockstep.engine import Resources
    from lockstep.engine.crew import Crew
    from lockstep.operator import TrainingOperator
    from lockstep.worker import WorkerSpec

_STOP_S = 5.0
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
        self._crew: Crew | None = None
        self._store: RendezvousStore | None = None
        self._server: ServerProcess | None = None
        payload = pickled_spec(spec)
        own_cluster = connect()
        self._session = session()
        bundle = placement.bundle_for(resources.num_cpus, resources.num_gpus, resources.further)
        remote_ranks = range(1 if use_local else 0, spec.num_workers)
        try:
            self._crew = crew = crew_for(bundle, remote_ranks, own_cluster)
            nodes = list(crew.nodes)
            self._actors = dict(zip(remote_ranks, crew.actors, strict=True))
            if use_local:
                nodes.insert(0, _this_node())
                self._local = Worker(spec, 0, 0)
            shared = ray.put(payload)
            for rank, actor in self._actors.items():
                actor.enlist.remote(shared, placement.local_ranks(nodes)[rank])
            store = self._store = _open_store(nodes, resources.timeout_s)
            one_node = store.host == LOOPBACK
            if spec.options.sync == "parameter_server" and spec.num_workers > 1:
                self._server = ServerProcess(
                    crew.room,
                    on_loopback=one_node,
                    size=spec.num_workers,
                    timeout_s=resources.timeout_s,
                )
            rendezvous = Rendezvous(
                store.host,
                store.port,
                generation=0,
                backend=resources.backend,
                one_node=one_node,
                timeout_s=resources.timeout_s,
                as_default=not (use_local and dist.is_initialized()),
                owner=self._server.address if self._server is not None else None,
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
        hearing = Hearing(method, self._server)
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
        hearing: Hearing,
        args: tuple[Any, ...],
        watch: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        worker.on_commit = every(WATCH_S, watch, worker)
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
            ready, _ = ray.wait([ref], timeout=WATCH_S)
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
            self._server = self._crew = None
        have_stopped = not force and self._stop_remotely()
        if self._local is not None:
            self._local.stop()
            self._local = None
        self._actors.clear()
        crew, self._crew = self._crew, None
        pids, self._pids = self._pids, []
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if crew is not None and crew.stays and have_stopped:
            come_back(crew)
            pids = []
        elif crew is not None:
            send_home(crew)
        _wait_until_gone([*pids, server.pid] if server is not None and server.on_loopback else pids)
        if self._store is not None:
            self._store.close()

    def _stop_remotely(self) -> bool:
        """Let the actors close loaders and connections; whether all of them did."""
        arguments = pickled((), "nothing")
        asked = [actor.perform.remote("stop", arguments) for actor in self._actors.values()]
        if not asked:
            return True
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_STOP_S)
        return len(answered) == len(asked) and not any(map(_has_failed, answered))


def _has_failed(ref: Any) -> bool:
    try:
        outcome: Outcome = ray.get(ref)
    # Whatever ended the actor or its call: the cause is sorted out where the call is heard.
    except Exception:
        return True
    return outcome.error is not None


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
