# SPDX-License-Identifier: Apache-2.0
"""The actors of a trainer's workers: started by the trainer, before it, or kept after it.

Importing torch is most of a launch, and a program that imports torch and then makes a trainer
waits twice: for its own import and for that of the workers. `prestart`, called before the program's
import, lets both happen at once. A program that makes one trainer after the other may keep the
processes between them. This module does not import torch before it has requested the actors.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ray
from lockstep.engine import placement_group
from lockstep.engine.actor_termination import end_actor
from lockstep.engine.cluster import connect, session
from lockstep.engine.idle_worker_eviction import evict_idle_workers
from lockstep.engine.ray_errors import ACTOR_DEATHS
from lockstep.engine.worker_actor import RemoteWorkerActor
from lockstep.errors import ConfigurationError
from lockstep.paused_gc import import_and_freeze

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ray.actor import ActorProxy
    from ray.util.placement_group import PlacementGroup

    from lockstep.engine.worker_actor import WorkerActor
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import ProgressReport
    from ray import ObjectRef


@dataclass(frozen=True)
class PoolRequest:
    """The actors that a trainer asks for; it takes over a pool that was started for an equal
    request.

    Attributes:
        bundle: the resources of each actor, in Ray's names.
        ranks: the ranks of the workers in actors; spares are numbered after the workers.
        num_spares: how many of `ranks`, the last ones, belong to spares.
    """

    bundle: dict[str, float]
    ranks: range
    num_spares: int


@dataclass(frozen=True)
class ActorPool:
    """Actors that import torch, in bundles of a placement group, by rank; without operators yet.

    Attributes:
        placement_group: where the actors' resources are reserved.
        nodes: the node id of each actor.
        bundles: the bundle of each actor in `placement_group`.
        request: what the pool was started for.
        session: the driver's connection to the cluster in which the actors were started.
        name: the prefix of the actors' names, unique to this pool.
    """

    placement_group: PlacementGroup
    nodes: list[str]
    bundles: list[int]
    actors: list[ActorProxy[WorkerActor]]
    request: PoolRequest
    session: str | None
    name: str

    @property
    def is_kept(self) -> bool:
        """Whether the actors wait for the next trainer after this trainer's shutdown."""
        return self.session in _sessions_that_keep


idle_pools: list[ActorPool] = []
"""The pool that waits for a trainer; at most one."""

_sessions_that_keep: set[str | None] = set()
"""The sessions in which `prestart(keep=True)` was called last."""

_KEPT: Final = "kept"

_ANSWER_S: Final = 0.5
"""How long a kept actor may take to answer; a dead one's error comes in milliseconds."""


def prestart(
    num_workers: int,
    *,
    keep: bool = False,
    num_cpus_per_worker: float = 1,
    num_gpus_per_worker: float = 0,
    resources_per_worker: Mapping[str, float] | None = None,
    use_local: bool = False,
    spare_workers: int = 0,
) -> None:
    """Start the worker processes of the next `TorchTrainer`, and import torch meanwhile.

    ::

        import lockstep
        lockstep.prestart(num_workers=2)
        import torch

    A trainer that asks for the same workers takes them over; another one that starts workers ends
    them.

    Args:
        num_workers: of the trainer.
        keep: from now on workers wait, after the `shutdown` of their trainer, for the next one
            that asks for the same: for notebooks that make one trainer after the other. Until
            one that asks for others, ``ray.shutdown()``, or the end of the program. What the
            operators left in the globals of modules is still there then. A worker that died is
            replaced.
        num_cpus_per_worker: as the trainer's.
        num_gpus_per_worker: 1 where the trainer's workers use a GPU.
        resources_per_worker: as the trainer's; the others as well.

    Raises:
        ConfigurationError: `num_workers` is not an int of 1 or more.
        NotEnoughResourcesError: the cluster has no room for them.
    """
    if not isinstance(num_workers, int) or num_workers < 1:
        raise ConfigurationError(
            f"num_workers cannot be {num_workers!r}", expected="an int, 1 or more"
        )
    end_idle_pools()
    own_cluster = connect()
    (_sessions_that_keep.add if keep else _sessions_that_keep.discard)(session())
    bundle = placement_group.bundle_for(
        num_cpus_per_worker, num_gpus_per_worker, resources_per_worker
    )
    ranks = remote_ranks(num_workers, use_local, spare_workers)
    if ranks:
        request = PoolRequest(bundle, ranks, spare_workers)
        idle_pools.append(_start(request, own_cluster, "prestarted"))
    if "torch" not in sys.modules:
        # The trainer needs torch anyhow. Garbage collection would be a fifth of the import.
        import_and_freeze("torch")


def remote_ranks(num_workers: int, use_local: bool, num_spares: int) -> range:
    """The ranks of a trainer's workers in actors; spares are numbered after the workers."""
    return range(1 if use_local else 0, num_workers + num_spares)


def take_or_start(request: PoolRequest, own_cluster: bool, label: str) -> ActorPool:
    """Take over the idle pool if it fits `request`; else start a new pool, named after `label`."""
    if idle_pools and idle_pools[0].request == request and idle_pools[0].session == session():
        pool = idle_pools.pop()
        whole = _replace_dead(pool, _living(pool)) if pool.is_kept else pool
        if whole is not None:
            return whole
    end_idle_pools()
    return _start(request, own_cluster, label)


def _start(request: PoolRequest, own_cluster: bool, label: str) -> ActorPool:
    """Reserve resources and start an actor for each rank, all at once."""
    count = len(request.ranks)
    if not placement_group.is_free(request.bundle, count):
        evict_idle_workers()
    group = placement_group.reserve(request.bundle, count, own_cluster)
    if session() in _sessions_that_keep:
        label = _KEPT  # this pool serves one operator after the other
    name = _unique_name(label)
    actors: list[ActorProxy[WorkerActor]] = []
    try:
        places = placement_group.bundles_by_rank(group, count, request.num_spares)
        actors += [
            _start_actor(group, request.bundle, bundle, rank, name)
            for rank, (bundle, _) in zip(request.ranks, places, strict=True)
        ]
    except BaseException:
        # On Ctrl-C as well: no other code has a reference to these actors yet.
        _end(group, actors)
        raise
    bundles, nodes = [bundle for bundle, _ in places], [node for _, node in places]
    return ActorPool(group, nodes, bundles, actors, request, session(), name)


def _unique_name(label: str) -> str:
    # Trainers of the same operator live side by side in a namespace of Ray, as trials of Tune do.
    return f"lockstep:{label}:{secrets.token_hex(3)}"


def _start_actor(
    group: PlacementGroup, resources: Mapping[str, float], bundle: int, number: int, pool_name: str
) -> ActorProxy[WorkerActor]:
    custom_resources = {name: n for name, n in resources.items() if name not in ("CPU", "GPU")}
    options = RemoteWorkerActor.options(
        # The worker's number and not its rank: ranks change hands when a worker dies.
        name=f"{pool_name}:worker{number}",
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources=custom_resources or None,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    )
    started: ActorProxy[WorkerActor] = options.remote(number)
    return started


def start_replacement(pool: ActorPool, bundle: int, number: int) -> ActorProxy[WorkerActor]:
    """Start an actor in the bundle of one that has died.

    The bundle stays reserved. If its node is gone, Ray moves the bundle to another node as soon as
    one has the resources, and then starts the actor.
    """
    return _start_actor(pool.placement_group, pool.request.bundle, bundle, number, pool.name)


def keep_idle(pool: ActorPool, stopped: Sequence[WorkerHandle]) -> None:
    """Keep a pool for the next trainer, with new actors in the place of those that have died.

    Args:
        stopped: those workers that wait for another trainer; no other bundle holds an actor.
    """
    end_idle_pools()
    whole = _replace_dead(pool, {worker.bundle: worker.actor for worker in stopped})
    if whole is not None:
        idle_pools.append(whole)


def _living(pool: ActorPool) -> dict[int | None, ActorProxy[WorkerActor] | None]:
    """The actors that have not died while they were idle, by bundle."""
    answers = {actor.progress.remote(): place for place, actor in enumerate(pool.actors)}
    # An actor that does not answer in time is still importing torch.
    answered, _ = ray.wait(list(answers), num_returns=len(answers), timeout=_ANSWER_S)
    dead = {answers[answer] for answer in answered if _is_from_dead_actor(answer)}
    return {
        bundle: actor
        for place, (bundle, actor) in enumerate(zip(pool.bundles, pool.actors, strict=True))
        if place not in dead
    }


def _is_from_dead_actor(answer: ObjectRef[ProgressReport]) -> bool:
    try:
        ray.get(answer)
    except ACTOR_DEATHS:
        return True
    return False


def _replace_dead(
    pool: ActorPool, living: Mapping[int | None, ActorProxy[WorkerActor] | None]
) -> ActorPool | None:
    """The pool with a new actor in each bundle that none of `living` holds.

    Returns:
        None, and nothing is left of the pool, where a node has died.
    """
    request, group = pool.request, pool.placement_group
    actors = [living.get(bundle) for bundle in pool.bundles]
    if not placement_group.is_complete(group):
        _end(group, [actor for actor in actors if actor is not None])
        return None
    places = placement_group.bundles_by_rank(group, len(request.ranks), request.num_spares)
    bundles, nodes = [bundle for bundle, _ in places], [node for _, node in places]
    # The next trainer counts its workers from 0 again, and each needs a name of its own.
    pool = replace(pool, name=_unique_name(_KEPT), nodes=nodes, bundles=bundles)
    whole = [
        living.get(bundle) or start_replacement(pool, bundle, number)
        for number, bundle in zip(request.ranks, bundles, strict=True)
    ]
    return replace(pool, actors=whole)


def end_pool(pool: ActorPool) -> None:
    """End the pool's processes and give their resources back."""
    _end(pool.placement_group, pool.actors)


def end_idle_pools() -> None:
    """End a pool that no trainer took over."""
    while idle_pools:
        pool = idle_pools.pop()
        if pool.session == session():  # else the pool has ended with its session
            end_pool(pool)


def _end(group: PlacementGroup, actors: list[ActorProxy[WorkerActor]]) -> None:
    for actor in actors:
        end_actor(actor)
    placement_group.release(group)
