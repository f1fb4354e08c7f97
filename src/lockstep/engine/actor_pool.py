# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a trainer: made by it, made ready before it, or kept after it.

Importing torch is most of a launch, and a program that imports torch itself and then makes a
trainer pays for it twice in a row. `prestart`, before that import, lets both happen at once;
and a program that makes one trainer after the other may keep the processes between them.
Nothing here imports torch before the workers have been asked for.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ray
from lockstep.engine import placement_group
from lockstep.engine.actor import RemoteWorker
from lockstep.engine.cluster import connect, session
from lockstep.engine.interrupted_calls import give_up_left
from lockstep.errors import ConfigurationError
from lockstep.import_without_gc import import_and_freeze

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True)
class ActorPool:
    """Actors that import torch, in the room reserved for them, by rank; no operator yet.

    Attributes:
        nodes: the node id of each actor.
        seats: the bundle of each actor in `room`.
        asked: what was asked for, to tell whether another trainer wants the same.
        session: the stay in a cluster that they belong to.
        name: what their actors' names begin with; no other pool has it.
    """

    room: PlacementGroup
    nodes: list[str]
    seats: list[int]
    actors: list[Any]
    asked: tuple[dict[str, float], range, int]
    session: str | None
    name: str

    @property
    def stays(self) -> bool:
        """They wait for the next trainer when this one is over."""
        return self.session in _keeping


_waiting: list[ActorPool] = []
_keeping: set[str | None] = set()
"""The stays in a cluster whose workers go from one trainer to the next."""


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

    A trainer that asks for the same workers takes them over; another one sends them home.

    Args:
        num_workers: of the trainer.
        keep: from now on workers wait, after the `shutdown` of their trainer, for the next one
            that asks for the same: for notebooks that make one trainer after the other. Until
            one that asks for others, ``ray.shutdown()``, or the end of the program. What the
            operators left in the globals of modules is still there then.
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
    dismiss_waiting()
    own_cluster = connect()
    (_keeping.add if keep else _keeping.discard)(session())
    bundle = placement_group.bundle_for(
        num_cpus_per_worker, num_gpus_per_worker, resources_per_worker
    )
    ranks = remote_ranks(num_workers, use_local, spare_workers)
    if ranks:
        _waiting.append(hire(bundle, ranks, spare_workers, own_cluster, "prestarted"))
    if "torch" not in sys.modules:
        # The trainer needs it anyhow. Searching for garbage is a fifth of the import.
        import_and_freeze("torch")


def remote_ranks(num_workers: int, use_local: bool, num_spares: int) -> range:
    """Which ranks of a trainer live in actors; spares are numbered after the workers."""
    return range(1 if use_local else 0, num_workers + num_spares)


def crew_for(
    bundle: dict[str, float], ranks: range, num_spares: int, own_cluster: bool, label: str
) -> ActorPool:
    """The pool that waits, if it is the one that is asked for; else a new one, named `label`."""
    asked = (bundle, ranks, num_spares)
    if _waiting and _waiting[0].asked == asked and _waiting[0].session == session():
        return _waiting.pop()
    dismiss_waiting()
    if not placement_group.is_free(bundle, len(ranks)):
        give_up_left()
    return hire(*asked, own_cluster, label)


def hire(
    bundle: dict[str, float], ranks: range, num_spares: int, own_cluster: bool, label: str
) -> ActorPool:
    """Reserve room and start an actor for each of `ranks`, all at once.

    Args:
        num_spares: how many of `ranks`, the last ones, belong to spares.
    """
    room = placement_group.find_room(bundle, len(ranks), own_cluster)
    if session() in _keeping:
        label = "kept"  # for one operator after the other
    # Trainers of the same operator live side by side in a namespace of Ray, as trials of Tune do.
    name = f"lockstep:{label}:{secrets.token_hex(3)}"
    actors: list[Any] = []
    try:
        places = placement_group.places_in(room, len(ranks), num_spares)
        actors += [
            _hired(room, bundle, seat, rank, name)
            for rank, (seat, _) in zip(ranks, places, strict=True)
        ]
    except BaseException:
        # Ctrl-C most of all: nobody else knows of them yet.
        _send_home(room, actors)
        raise
    seats, nodes = [seat for seat, _ in places], [node for _, node in places]
    return ActorPool(room, nodes, seats, actors, (bundle, ranks, num_spares), session(), name)


def _hired(
    room: PlacementGroup, bundle: Mapping[str, float], seat: int, number: int, crew_name: str
) -> Any:
    further = {name: n for name, n in bundle.items() if name not in ("CPU", "GPU")}
    options = RemoteWorker.options(
        # Its number and not its rank: ranks change hands when a worker dies.
        name=f"{crew_name}:worker{number}",
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources=further or None,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            room, placement_group_bundle_index=seat
        ),
    )
    return options.remote(number)


def replacement(pool: ActorPool, seat: int, number: int) -> Any:
    """Another actor where one of the pool has died.

    Its room stays reserved. If its node is gone, Ray reserves room elsewhere, when there is
    some, and starts the actor then.
    """
    return _hired(pool.room, pool.asked[0], seat, number, pool.name)


def come_back(pool: ActorPool) -> None:
    """A pool whose workers have stopped waits for the next trainer."""
    dismiss_waiting()
    _waiting.append(pool)


def send_home(pool: ActorPool) -> None:
    """End the processes and give their room back."""
    _send_home(pool.room, pool.actors)


def dismiss_waiting() -> None:
    """End a pool that nobody took over."""
    while _waiting:
        pool = _waiting.pop()
        if pool.session != session():
            continue  # ended with the stay that it belonged to
        send_home(pool)


def _send_home(room: PlacementGroup, actors: list[Any]) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)
    placement_group.release(room)
