# SPDX-License-Identifier: Apache-2.0
"""Workers as plain Ray actors in a placement group; rank 0 in the driver if so asked.

Every actor answers with an `Outcome`, so a failure is a value until the driver has heard
enough to tell its cause: a survivor's broken connection often arrives before the error, or
the death, that broke it.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from ray.exceptions import RayActorError

import ray
from lockstep.engine import placement_group
from lockstep.engine.actor_failures import ctrl_c_as_itself, has_failed, wait_until_gone
from lockstep.engine.actor_pool import come_back, crew_for, remote_ranks, replacement, send_home
from lockstep.engine.background_poll import looking_after
from lockstep.engine.base import COLLECTIVE_METHODS, METHODS_APART, PoolStatus
from lockstep.engine.breakpoints import breakpoints_here
from lockstep.engine.cluster import connect, session
from lockstep.engine.inline import every
from lockstep.engine.interrupted_calls import between_steps
from lockstep.engine.pending_call import WATCH_S, PendingCall
from lockstep.engine.rendezvous import LOOPBACK, RendezvousStore
from lockstep.engine.server_actor import ServerProcess
from lockstep.engine.snapshot_fetcher import RemoteSnapshotFetcher
from lockstep.engine.spares import Readiness, look_at
from lockstep.engine.worker_handle import WorkerHandle, kill, this_node
from lockstep.errors import PeerLostError, WorkerDiedError
from lockstep.serialization import pickled
from lockstep.worker import Rendezvous, Worker, add_rank, is_peer_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lockstep.engine import Resources
    from lockstep.engine.actor_pool import ActorPool
    from lockstep.engine.base import SnapshotFetcher, SnapshotKeeper, Watch
    from lockstep.operator import TrainingOperator
    from lockstep.worker import WorkerSpec

_STOP_S = 5.0
_RESCUE_S = 2.0
_LOOK_S = 0.02


class RayEngine:
    """See `Engine`.

    Attributes:
        members: the workers, by rank.
        spares: workers that run their `setup`, or have run it, and what to wait for until then.
    """

    def __init__(
        self, spec: WorkerSpec, resources: Resources, *, use_local: bool, num_spares: int
    ) -> None:
        self.spec = spec
        self.ended: BaseException | None = None
        self.started: list[dict[str, Any]] = []
        self.members: list[WorkerHandle] = []
        self.spares: list[tuple[WorkerHandle, Any]] = []
        self._resources = resources
        self._use_local = use_local
        self._hired = 0
        self._generation = 0
        self._pool: ActorPool | None = None
        self._fetcher: RemoteSnapshotFetcher | None = None
        self._store: RendezvousStore | None = None
        self._server: ServerProcess | None = None
        payload = spec.pickled()
        own_cluster = connect()
        self._session = session()
        bundle = placement_group.bundle_for(
            resources.num_cpus, resources.num_gpus, resources.further
        )
        ranks = remote_ranks(spec.num_workers, use_local, num_spares)
        try:
            label = spec.operator_cls.__name__
            self._pool = crew_for(bundle, ranks, num_spares, own_cluster, label)
            self._payload = ray.put(payload)
            self._enlist(self._pool, ranks)
            self._open_server(self._pool)
            rendezvous = self.rendezvous(0) if spec.num_workers > 1 else None
            self.started = self.call("start", rendezvous)
            self._await_spares()
        except BaseException as error:
            self.ended = self.ended or error
            self.close(force=True)
            raise
        for member, answer in zip(self.members, self.started, strict=True):
            member.pid = answer["pid"]

    def _enlist(self, pool: ActorPool, ranks: range) -> None:
        nodes = list(pool.nodes)
        found: list[WorkerHandle] = []
        if self._use_local:
            nodes.insert(0, this_node())
            found.append(WorkerHandle(0, nodes[0], 0, worker=Worker(self.spec, 0, 0)))
        local_ranks = placement_group.local_ranks(nodes)
        for rank, seat, actor in zip(ranks, pool.seats, pool.actors, strict=True):
            actor.enlist.remote(self._payload, rank, local_ranks[rank])
            found.append(WorkerHandle(rank, nodes[rank], local_ranks[rank], actor, seat=seat))
        self._hired = len(found)
        self.members = found[: self.spec.num_workers]
        self.spares = [(member, _stands_by(member)) for member in found[self.spec.num_workers :]]

    def _await_spares(self) -> None:
        """They started with the others; what is wrong with one is wrong now, and not in need."""
        while any(_is_starting(member, ref) for member, ref in self.spares):
            self.pause(_STOP_S)

    def _open_server(self, pool: ActorPool) -> None:
        if self.spec.options.sync == "parameter_server" and self.spec.num_workers > 1:
            self._server = ServerProcess(
                pool.room,
                pool.seats[0],
                name=f"{pool.name}:parameter-server",
                timeout_s=self._resources.timeout_s,
            )

    # ------------------------------------------------------------------------ generations

    def rendezvous(self, generation: int) -> Rendezvous:
        """Where the members meet to become generation `generation`, each in a store of its own."""
        resources, self._generation = self._resources, generation
        only_node = this_node() if self._is_on_one_node() else None
        host = LOOPBACK if only_node else ray.util.get_node_ip_address()
        self.call_off()
        server = self._server
        owner = None if server is None else server.listen(len(self.members), only_node)
        self._store = RendezvousStore(host, resources.timeout_s)
        return Rendezvous(
            self._store.host,
            self._store.port,
            generation=generation,
            backend=resources.backend,
            one_node=host == LOOPBACK,
            timeout_s=resources.timeout_s,
            as_default=not (self._use_local and dist.is_initialized()),
            owner=owner,
        )

    def call_off(self) -> None:
        """Free the members that wait at a meeting to which somebody will not come."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def break_group(self, ranks: Iterable[int]) -> None:
        """Free those of `ranks` that wait for a peer who will never come, nor close its sockets.

        The group of all is of no use afterwards. A call that arrives when the next one has formed
        does nothing.
        """
        if self._server is not None:
            self._server.call_off()
        for rank in ranks:
            member = self.members[rank]
            if member.worker is not None:
                member.worker.break_group(self._generation)
            else:
                member.actor.break_group.remote(self._generation)

    def _is_on_one_node(self) -> bool:
        here = this_node()
        return all(member.node == here for member in self.members)

    def hire(self, seat: int, local_rank: int) -> None:
        """Start another worker in a seat that is free; it becomes a spare."""
        assert self._pool is not None
        number, self._hired = self._hired, self._hired + 1
        actor = replacement(self._pool, seat, number)
        member = WorkerHandle(number, "", local_rank, actor, seat=seat)
        actor.enlist.remote(self._payload, number, local_rank)
        self.spares.append((member, _stands_by(member)))

    def bury(self, member: WorkerHandle) -> None:
        """Make sure that a member's process is gone, and forget it."""
        kill(member, self.members)
        self.forget(member)

    def forget(self, member: WorkerHandle) -> None:
        """A member's process is gone. It is not signalled: its number may be another's by now."""
        if member in self.members:
            self.members.remove(member)
        self.spares = [each for each in self.spares if each[0] is not member]

    def line_up(self, members: Sequence[WorkerHandle]) -> None:
        """These are the members from now on, by rank; who was a spare is none any more."""
        self.members = list(members)
        self.spares = [each for each in self.spares if each[0] not in members]

    @property
    def _rank_0(self) -> WorkerHandle | None:
        return self.members[0] if self.members else None

    @property
    def everyone(self) -> list[WorkerHandle]:
        """Members and spares, ready or not."""
        return [*self.members, *(member for member, _ in self.spares)]

    # -------------------------------------------------------------------------------- calling

    def call(
        self,
        method: str,
        *args: Any,
        watch: Watch | None = None,
        retries: int = 0,
    ) -> list[Any]:
        pending_call = self.hear(method, args, range(len(self.members)), watch=watch)
        return self.conclude(pending_call)

    def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        return self.conclude(self.hear(method, args, [rank]))[0]

    def conclude(self, pending_call: PendingCall) -> list[Any]:
        """The values, by rank; or the end of the workers if they cannot go on, and the cause."""
        cause = pending_call.cause()
        if cause is None:
            return [pending_call.values[rank] for rank in sorted(pending_call.values)]
        waits = bool(pending_call.pending) and not self._finishes_alone(pending_call.method)
        if pending_call.method in COLLECTIVE_METHODS or waits or pending_call.deaths:
            self.end(cause)
        raise cause

    def _finishes_alone(self, method: str) -> bool:
        """Who is still at it will come to its end; a call that comes meanwhile waits its turn."""
        in_shards = self.spec.options.sync == "fsdp" and method == "apply_state"
        return method in METHODS_APART and not in_shards

    @property
    def left(self) -> BaseException | None:
        """Never: where nobody forms the group anew, who leaves a call ends the workers."""
        return None

    def settle(self) -> None:
        """Nothing; see `left`."""

    def end(self, cause: BaseException) -> None:
        """End all workers because of `cause`."""
        self.ended = cause
        try:
            self.rescue(cause)
        finally:
            self.close(force=True)

    def rescue(self, cause: BaseException) -> None:
        """A copy of the state that was made before the failure is as good as any."""
        if self._fetcher is not None and isinstance(cause, Exception) and self._is_in_session:
            self._fetcher.finish(_RESCUE_S)

    def hear(
        self,
        method: str,
        args: tuple[Any, ...],
        ranks: Sequence[int],
        *,
        watch: Watch | None = None,
        guard: Callable[[PendingCall], None] | None = None,
        args_of: Callable[[int], tuple[Any, ...]] | None = None,
        leave: Callable[[BaseException], None] | None = None,
    ) -> PendingCall:
        """Let `ranks` do `method`, and hear what they answer.

        Args:
            watch: see `Engine.call`.
            guard: looks after the workers meanwhile. With one, a worker's death ends nothing.
            args_of: each rank's further arguments.
            leave: what to do where the driver stops to listen in the middle, because of Ctrl-C
                most of all; the workers are ended if None.
        """
        self._check_session()
        pending_call = PendingCall(method, self._server, hears_all=guard is not None)
        if self._fetcher is not None:
            self._fetcher.attend()
        local: WorkerHandle | None = None
        try:
            arguments = pickled(args, f"an argument of {method}")
            shared = ray.put(arguments) if len(arguments) > 100_000 else arguments
            for rank in ranks:
                member = self.members[rank]
                if args_of is not None:
                    shared = pickled((*args, *args_of(rank)), f"an argument of {method}")
                if member.actor is None:
                    local = member
                else:
                    pending_call.pending[member.actor.perform.remote(method, shared)] = rank
            if local is not None and local.worker is not None:
                local.worker.before_meeting = partial(self._wait_for_peers, pending_call.pending)
                own = args if args_of is None else (*args, *args_of(0))
                pending_call.here = partial(local.worker.where, threading.get_ident())
                look = partial(guard, pending_call) if guard is not None else None
                looks = nullcontext() if look is None else looking_after(look)
                with looks, between_steps(local.worker):
                    _perform_here(local.worker, pending_call, own, watch)
                watch = pending_call.here = None
            pending_call.listen(self._looker(pending_call, watch, guard))
        except BaseException as error:
            # Nobody may be left behind in the middle of a step.
            if pending_call.pending or local is not None:
                (leave or self.end)(error)
            raise
        return pending_call

    @property
    def _is_in_session(self) -> bool:
        return session() == self._session

    def _check_session(self) -> None:
        # Asked before Ray is: it would start a new cluster to look for our actors there.
        if not self._is_in_session:
            over = _session_over()
            self.end(over)
            raise over

    @ctrl_c_as_itself()
    def _wait_for_peers(self, pending: Mapping[Any, int]) -> None:
        """Rank 0 in this process joins the meeting only when the others stand at it.

        Once the ranks have met, one that fails closes its sockets and so frees the others.
        One that fails before would never come, and a wait inside gloo hears of nothing: no
        failure and no Ctrl-C.
        """
        assert self._store is not None
        while not self._store.have_come(pending.values()):
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=_LOOK_S)
            if any(map(has_failed, ready)):
                raise PeerLostError(
                    "the ranks did not meet",
                    where=f"rank 0 of {len(self.members)}",
                    cause="another rank failed or died before it came",
                    fix="look for the first failure among the other ranks",
                )

    def _looker(
        self,
        pending_call: PendingCall,
        watch: Watch | None,
        guard: Callable[[PendingCall], None] | None,
    ) -> Callable[[], None] | None:
        actors = [member.actor for member in self.members if member.actor is not None]
        fetcher = self._fetcher if pending_call.method == "train" else None
        if guard is None and fetcher is None and (watch is None or not actors):
            return None

        is_logged = bool(self.spec.log_every) and len(actors) == len(self.members)
        since = 0 if is_logged else None

        def look() -> None:
            nonlocal since
            if watch is not None and actors:
                since = _tell_progress(actors, watch, since)
            if guard is not None:
                guard(pending_call)
            if fetcher is not None:
                fetcher.look()

        return look

    def bring_snapshots(self, to: SnapshotKeeper) -> SnapshotFetcher:
        self._fetcher = RemoteSnapshotFetcher(lambda: self._rank_0, to)
        return self._fetcher

    def roll_call(self) -> PendingCall:
        """Who of the members does not live any more; asks each of them."""
        self._check_session()
        pending_call = PendingCall("roll call", hears_all=True)
        for rank, member in enumerate(self.members):
            if member.actor is not None:
                pending_call.pending[member.actor.alive.remote()] = rank
        pending_call.listen(None)
        return pending_call

    @ctrl_c_as_itself()
    def pause(self, seconds: float) -> None:
        """Wait, for workers that start."""
        starting = [ref for _, ref in self.spares]
        ray.wait(starting, num_returns=len(starting), timeout=seconds)

    # --------------------------------------------------------------------------------- ending

    def local_operator(self) -> TrainingOperator | None:
        first = self._rank_0
        return None if first is None or first.worker is None else first.worker.operator

    def cut_anew(self, num_shards: int) -> None:
        self.spec = replace(self.spec, num_shards=num_shards)

    def roster(self) -> PoolStatus:
        return PoolStatus(workers=len(self.members), spares=len(self.spares))

    def close(self, *, force: bool) -> None:
        everyone = self.everyone
        members, self.members, self.spares = self.members, [], []
        if not self._is_in_session:
            everyone = []
            self._server = self._pool = None
        actors = [member.actor for member in everyone if member.actor is not None]
        pids = [each.pid for each in everyone if each.actor and each.pid and each.is_here]
        have_stopped = False
        try:
            have_stopped = not force and _stop(actors)
            for member in members:
                if member.worker is not None:
                    member.worker.stop()
        finally:
            # Also where Ctrl-C came while a worker was waited for: nobody closes it again.
            self._let_go(actors, pids, keep=have_stopped)

    def _let_go(self, actors: list[Any], pids: list[int], *, keep: bool) -> None:
        pool, self._pool = self._pool, None
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if pool is not None and pool.stays and keep and pool.actors == actors:
            come_back(pool)
            pids = []
        elif pool is not None:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            send_home(pool)
        if server is not None and server.is_here:
            pids.append(server.pid)
        wait_until_gone(pids, _STOP_S)
        self.call_off()


def _is_starting(member: WorkerHandle, starting: Any) -> bool:
    state, error = look_at(member, starting)
    if error is not None:
        error.add_note(f"raised by {member}, a spare, which knows its rank only when it is needed")
        raise error
    return state is Readiness.STARTING


def _stands_by(member: WorkerHandle) -> Any:
    return member.actor.perform.remote("stand_by", pickled((), "nothing"))


def _perform_here(
    worker: Worker,
    pending_call: PendingCall,
    args: tuple[Any, ...],
    watch: Watch | None,
) -> None:
    worker.on_commit = every(WATCH_S, watch, worker)
    try:
        with breakpoints_here():
            pending_call.values[0] = getattr(worker, pending_call.method)(*args)
    except Exception as error:
        if pending_call.method in COLLECTIVE_METHODS:
            worker.leave()
        add_rank(error, 0)
        pending_call.failed(0, error, peer_lost=is_peer_lost(error))
    finally:
        worker.on_commit = None


def _tell_progress(actors: Sequence[Any], watch: Watch, since: int | None) -> int | None:
    """Tell `watch` of rank 0's progress, and of all ranks' rows after step `since`."""
    refs = [actors[0].progress.remote()]
    refs += [] if since is None else [actor.step_rows.remote(since) for actor in actors]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=WATCH_S)
    # A dead actor's progress is of no interest: its call says why.
    try:
        if len(ready) == len(refs):
            progress, *rows = ray.get(refs)
            written = watch({**progress, "rows": rows} if rows else progress)
            return None if since is None else written
    except RayActorError:
        pass
    return since


@ctrl_c_as_itself()
def _stop(actors: Sequence[Any]) -> bool:
    """Let the actors close loaders and connections; whether all of them did."""
    arguments = pickled((), "nothing")
    asked = [actor.perform.remote("stop", arguments) for actor in actors]
    if not asked:
        return True
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_STOP_S)
    return len(answered) == len(asked) and not any(map(has_failed, answered))


def _session_over() -> WorkerDiedError:
    return WorkerDiedError(
        "Ray was shut down, and this trainer's workers with it",
        cause="ray.shutdown() was called in this process",
        fix="create a new TorchTrainer; load(path) goes on from a checkpoint",
    )
