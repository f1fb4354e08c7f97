# SPDX-License-Identifier: Apache-2.0
"""`OrderedProcessGroup`: a process group that compares the ranks' next collective before it runs.

The mesh of a sharded model has it in the place of the ranks' own group. So norms for clipping, and
whatever else torch's DTensor sends for a program, cannot meet a gather of weights on another rank.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from lockstep._torch_compat.fully_shard import COLLECTIVES
from lockstep.errors import PeerLostError
from lockstep.sync.copy_collectives import run_in_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep.sync.mesh_collectives import MeshCollectives
    from lockstep.sync.unit_order import UnitOrder

_BACKEND: Final = "lockstep_ordered"


class OrderedProcessGroup(dist.ProcessGroup):
    """See the module.

    Args:
        carrier: the group that the collectives run over; held until `close`.
        order: compares the ranks.
        collectives: of the ranks, of which those of a copy of the model are this group's.
    """

    def __init__(
        self, carrier: dist.ProcessGroup, order: UnitOrder, collectives: MeshCollectives
    ) -> None:
        mesh = collectives.mesh
        # Torch types the constructor without the one that groups written in Python have.
        super().__init__(mesh.shard_rank, mesh.shard_size)  # type: ignore[call-arg]
        self._carrier: Any = carrier
        self._order = order
        self._collectives = collectives
        self._name = ""

    def close(self) -> None:
        """Let go of the group below: its sockets close when nothing else holds it."""
        self._carrier = None

    def run(self, name: str, *arguments: Any) -> Any:
        """Run the collective `name` of the group below, once every rank is about to.

        Where the model has several copies, among the ranks of this one.

        Raises:
            NotAvailableError: see `run_in_copy`.
            UnitOrderError: on every rank, if one is about to do something else.
            PeerLostError: the group was left.
        """
        if self._carrier is None:
            raise PeerLostError(
                "the ranks of this sharded model have left their group",
                got=name,
                fix="take whole tensors (get_model, full_tensor) while the trainer is open",
            )
        self._order.compare_collective(name, _size_of(arguments))
        if self._collectives.mesh.replicate_size == 1:
            return getattr(self._carrier, name)(*arguments)
        with self._order.own_collective():
            return run_in_copy(self._collectives, name, arguments)

    # torch asks these of a group that is written in Python.

    def getBackendName(self) -> str:
        return _BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:
        return self._name


def _size_of(arguments: tuple[Any, ...]) -> int:
    """Elements of all tensors of a collective."""
    given = [each for one in arguments for each in (one if isinstance(one, list) else [one])]
    return sum(each.numel() for each in given if isinstance(each, torch.Tensor))


def _collective(name: str) -> Callable[..., Any]:
    def run(self: OrderedProcessGroup, *arguments: Any) -> Any:
        return self.run(name, *arguments)

    return run


for _name in COLLECTIVES:
    setattr(OrderedProcessGroup, _name, _collective(_name))


def make_ordered_group(order: UnitOrder, collectives: MeshCollectives) -> OrderedProcessGroup:
    """An ordered group of the ranks of this rank's copy of the model, over torch's default group.

    Collective:
        Every rank: torch registers the group of each copy in its store.
    """
    made: list[OrderedProcessGroup] = []

    def create(*_: Any) -> OrderedProcessGroup:
        carrier = dist.group.WORLD
        assert carrier is not None
        made.append(OrderedProcessGroup(carrier, order, collectives))
        return made[0]

    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu", "cuda"])
    _waiting.append(create)
    try:
        with _without_bound_device():
            for ranks in collectives.mesh.copies:
                dist.new_group(list(ranks), backend=_BACKEND)
    finally:
        _waiting.clear()
    return made[0]


@contextmanager
def _without_bound_device() -> Iterator[None]:
    """Hide the device that the default group is bound to.

    Torch would ask the new group for its backend on that device, to connect it at once, and a group
    written in Python has none.
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


_waiting: Final[list[Callable[..., OrderedProcessGroup]]] = []
"""The maker of the group that torch is about to ask for: it registers one maker for a process."""


def _create(*arguments: Any) -> OrderedProcessGroup:
    return _waiting[-1](*arguments)
