# SPDX-License-Identifier: Apache-2.0
"""`WorkerGroup`: the worker processes of a run, members with a rank and spares, and their
rendezvous.

The placement group stays reserved from the first worker to the last. Processes in it come and go: a
lost member is forgotten, and a replacement starts as a spare in its bundle.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import cloudpickle
import torch.distributed as dist

import ray
from lockstep.engine import placement_group, rank_assignment
from lockstep.engine.actor_pool import (
    PoolRequest,
    end_pool,
    keep_idle,
    remote_ranks,
    start_replacement,
    take_or_start,
)
from lockstep.engine.actor_termination import end_actor, kill_worker, wait_until_gone
from lockstep.engine.call_relay import RANKS_PER_RELAY, next_call_number
from lockstep.engine.cluster import connect, session, this_node
from lockstep.engine.keyboard_interrupt import reraise_keyboard_interrupt
from lockstep.engine.parameter_server_actor import ServerHandle
from lockstep.engine.ray_errors import has_failed
from lockstep.engine.rendezvous_store import LOOPBACK, open_store
from lockstep.engine.spare_worker import Readiness, Sources, Spare
from lockstep.engine.worker_handle import WorkerHandle
from lockstep.hierarchical_sum import HostGrid
from lockstep.serialization import dumps_or_refuse
from lockstep.worker import Rendezvous, Worker, arrival_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ray.actor import ActorProxy

    from lockstep.engine.actor_pool import ActorPool
    from lockstep.engine.engine_protocol import Resources
    from lockstep.engine.worker_actor import WorkerActor
    from lockstep.worker import Outcome, RemoteCall, StartReport, WorkerSpec
    from ray import ObjectRef

    Actor = ActorProxy[WorkerActor]

_STOP_S: Final = 5.0


class WorkerGroup:
    """Starts the processes of a run's workers, keeps a list of them, ends them.

    Attributes:
        members: the workers with a rank, by rank.
        spares: workers without a rank that run their `setup`, or have run it.
        server: the parameter server, if there is one.
        generation: the number of the process group's generation; the first one is 0.
        ranks_per_relay: how many ranks have a common relay, if there are many ranks.
    """

    ranks_per_relay = RANKS_PER_RELAY

    def __init__(
        self, spec: WorkerSpec, resources: Resources, *, use_local: bool, num_spares: int
    ) -> None:
        self.members: list[WorkerHandle] = []
        self.spares: list[Spare] = []
        self.server: ServerHandle | None = None
        self._resources = resources
        self._use_local = use_local
        self._num_started = 0
        self._sources: defaultdict[str, Sources] = defaultdict(lambda: defaultdict(set))
        self._places: dict[WorkerHandle, ObjectRef[tuple[str, str]]] = {}
        self.generation = 0
        self._store: dist.TCPStore | None = None
        self._pool: ActorPool | None = None
        payload = spec.to_bytes()
        own_cluster = connect()
        self._session = session()
        bundle = placement_group.bundle_for(
            resources.num_cpus,
            int(spec.use_gpu) * spec.options.replicas,
            resources.custom_resources,
        )
        ranks = remote_ranks(spec.num_workers, use_local, num_spares)
        try:
            request = PoolRequest(bundle, ranks, num_spares)
            self._pool = take_or_start(request, own_cluster, spec.operator_cls.__name__)
            self._payload = ray.put(payload)
            self._assign_ranks(self._pool, spec)
            if spec.options.sync == "parameter_server" and spec.num_workers > 1:
                self.server = ServerHandle(
                    self._pool.placement_group,
                    self._pool.bundles[0],
                    name=f"{self._pool.name}:parameter-server",
                    timeout_s=resources.timeout_s,
                )
        except BaseException:
            self.close(force=True)
            raise

    def _assign_ranks(self, pool: ActorPool, spec: WorkerSpec) -> None:
        nodes = list(pool.nodes)
        found: list[WorkerHandle] = []
        if self._use_local:
            nodes.insert(0, this_node())
            here = Worker(spec, 0, 0, is_here=True)
            found.append(WorkerHandle(0, nodes[0], 0, worker=here))
        local_ranks = rank_assignment.local_ranks(nodes)
        for rank, bundle, actor in zip(pool.request.ranks, pool.bundles, pool.actors, strict=True):
            found.append(WorkerHandle(rank, nodes[rank], local_ranks[rank], actor, bundle=bundle))
        self._num_started = len(found)
        self.members = found[: spec.num_workers]
        for member in self.members:
            if member.actor is not None:
                self._places[member] = member.actor.assign.remote(
                    self._payload, member.number, member.local_rank
                )
        self.spares = [self._start_spare(handle) for handle in found[spec.num_workers :]]

    def note_started(self, reports: Sequence[StartReport]) -> None:
        """Note what members are known by from their `start` on: process ids, names of actors; and
        which source they have imported."""
        for member, report in zip(self.members, reports, strict=True):
            member.pid = report.pid
            if member in self._places:
                _, member.name = ray.get(self._places.pop(member))
            for name, digest in report.sources.items():
                self._sources[member.node][name].add(digest)

    def await_spares(self) -> None:
        """Wait until all spares are ready, so that a failing `setup` raises now and not in need."""
        while any(_is_starting(spare) for spare in self.spares):
            self.pause(_STOP_S)

    @reraise_keyboard_interrupt()
    def pause(self, seconds: float) -> None:
        """Wait `seconds`, or until all spares have run their `setup`."""
        starting = [spare.start_ref for spare in self.spares]
        ray.wait(starting, num_returns=len(starting), timeout=seconds)

    @property
    def rank_0(self) -> WorkerHandle | None:
        """The worker with rank 0; None where no worker is left."""
        return self.members[0] if self.members else None

    @property
    def all_workers(self) -> list[WorkerHandle]:
        """Members and spares, ready or not."""
        return [*self.members, *(spare.handle for spare in self.spares)]

    @property
    def hosts(self) -> HostGrid | None:
        """The members by node: in which order large sums are computed follows from it."""
        return HostGrid.of([member.node for member in self.members])

    @property
    def is_in_session(self) -> bool:
        """Whether the driver is still connected to the cluster that the workers live in."""
        return session() == self._session

    # ------------------------------------------------------------------------ generations

    def open_rendezvous(self) -> Rendezvous:
        """Open the rendezvous of `generation`, with a store of its own."""
        resources = self._resources
        here = this_node()
        is_one_node = all(member.node == here for member in self.members)
        only_node = here if is_one_node else None
        host = LOOPBACK if is_one_node else ray.util.get_node_ip_address()
        self.close_rendezvous()
        server = self.server
        server_address = None if server is None else server.listen(len(self.members), only_node)
        self._store = open_store(host, resources.timeout_s)
        return Rendezvous(
            self._store.host,
            self._store.port,
            generation=self.generation,
            backend=resources.backend,
            one_node=is_one_node,
            timeout_s=resources.timeout_s,
            as_default=not (self._use_local and dist.is_initialized()),
            server_address=server_address,
        )

    @property
    def timeout_s(self) -> float:
        """The longest that a rank waits for another one."""
        return self._resources.timeout_s

    def ranks_to_arrive(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that have not arrived at the rendezvous yet; never blocks."""
        store = self._store
        assert store is not None
        return [rank for rank in ranks if not store.check([arrival_key(rank)])]

    def close_rendezvous(self) -> None:
        """Close the store, which frees members that wait there for a member that will not come."""
        self._store = None

    def break_group(self, ranks: Iterable[int]) -> None:
        """Free those of `ranks` that wait for a peer which neither answers nor closes its sockets.

        The run's process group cannot be used afterwards. A call that arrives when the next
        generation has formed does nothing.
        """
        if self.server is not None:
            self.server.stop()
        for rank in ranks:
            self.members[rank].break_group(self.generation)

    def start_spare(self, bundle: int, local_rank: int) -> None:
        """Start another worker in a free bundle, as a spare."""
        assert self._pool is not None
        number, self._num_started = self._num_started, self._num_started + 1
        actor = start_replacement(self._pool, bundle, number)
        handle = WorkerHandle(number, "", local_rank, actor, bundle=bundle)
        self.spares.append(self._start_spare(handle))

    def _start_spare(self, handle: WorkerHandle) -> Spare:
        assert handle.actor is not None, "spares live in actors"
        place_ref = handle.actor.assign.remote(self._payload, handle.number, handle.local_rank)
        start_ref = _send(handle.actor, Worker.stand_by.with_args())
        return Spare(handle, place_ref, start_ref, self._sources)

    def kill(self, worker: WorkerHandle) -> None:
        """Kill a worker's process, and forget the worker."""
        kill_worker(worker, self.members)
        self.forget(worker)

    def forget(self, worker: WorkerHandle) -> None:
        """Forget a worker whose process is gone. Sends no signal: the pid may have been reused.

        Ray ends a process that has only lost its connection: it would keep its bundle from a
        replacement.
        """
        if worker.actor is not None:
            end_actor(worker.actor)
        if worker in self.members:
            self.members.remove(worker)
        self.spares = [spare for spare in self.spares if spare.handle is not worker]

    def set_members(self, members: Sequence[WorkerHandle]) -> None:
        """Set the members, by rank; spares among them leave `spares`."""
        self.members = list(members)
        self.spares = [spare for spare in self.spares if spare.handle not in members]

    # --------------------------------------------------------------------------------- ending

    def close(self, *, force: bool) -> None:
        """End all processes; see `Engine.close`."""
        workers = self.all_workers
        members, self.members, self.spares = self.members, [], []
        if not self.is_in_session:
            workers = []
            self.server = self._pool = None
        in_actors = [worker for worker in workers if worker.actor is not None]
        stopped: list[WorkerHandle] = []
        try:
            if not force:
                stopped = _stop(in_actors)
            for member in members:
                if member.worker is not None:
                    member.worker.stop()
        finally:
            # Also after Ctrl-C in the wait for a worker: no later call releases the resources.
            self._release(in_actors, stopped)

    def _release(self, workers: list[WorkerHandle], stopped: list[WorkerHandle]) -> None:
        pool, self._pool = self._pool, None
        server, self.server = self.server, None
        if server is not None:
            server.close()
        is_kept = pool is not None and pool.is_kept and bool(stopped)
        ended = [worker for worker in workers if not is_kept or worker not in stopped]
        for worker in ended:
            end_actor(worker.actor)
        if pool is not None and is_kept:
            keep_idle(pool, stopped)
        elif pool is not None:
            end_pool(pool)
        pids = [worker.pid for worker in ended if worker.pid and worker.is_here]
        if server is not None and server.is_here:
            pids.append(server.pid)
        wait_until_gone(pids, _STOP_S)
        self.close_rendezvous()


def _send(actor: Actor, call: RemoteCall[Worker, object]) -> ObjectRef[Outcome]:
    """Send `call` to an actor, outside of any `PendingCall`."""
    return actor.perform.remote(
        cloudpickle.dumps(call.method),
        dumps_or_refuse((call.args, call.kwargs), "nothing"),
        next_call_number(),
    )


def _is_starting(spare: Spare) -> bool:
    readiness = spare.readiness()
    if spare.error is not None:
        spare.error.add_note(
            f"raised by {spare.handle}, a spare, which knows its rank only when it is needed"
        )
        raise spare.error
    return readiness is Readiness.STARTING


@reraise_keyboard_interrupt()
def _stop(workers: Sequence[WorkerHandle]) -> list[WorkerHandle]:
    """Let workers close loaders and connections; return those that have done so in time."""
    asked = {
        _send(worker.actor, Worker.stop.with_args()): worker
        for worker in workers
        if worker.actor is not None
    }
    if not asked:
        return []
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_STOP_S)
    return [asked[ref] for ref in answered if not has_failed(ref)]
