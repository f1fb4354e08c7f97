# SPDX-License-Identifier: Apache-2.0
"""N gradients become one, and every rank keeps a share of what optimizers hold.

Weights and gradients are whole on every rank and synchronised as in `GradientSync`; the modules
keep their own parameters. Shared out is the work of the optimizers, by rows, and their state.

Rejected: torch's `fully_shard`. It exchanges a module's parameters for others whenever it gathers
or gives up weights, so that what was listed before a backward is dead after it; and within a
step whole weights and whole gradients are needed at once in any case, because its own
reduce-scatter averages over ranks, mixes the gradients of different layers when branches differ,
gives zeros to what nobody used, and needs every rank to run the same forwards and backwards.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.errors import (
    GradientNotReducedError,
    LockstepError,
    NotAvailableError,
    PeerLostError,
)
from lockstep.sync.bucket_transport import BucketTransport
from lockstep.sync.gradient_sync import GradientSync
from lockstep.sync.parameter_shards import ShardOfParameter, gather_rows, has_rows, state_in_shards
from lockstep.sync.sharded_optimizer import ShardedOptimizer, steps_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.group import Group


_ROUND: Final = -1
"""The end of a backward, where the ranks meet; optimizers have their numbers."""


class FSDPSync(GradientSync):
    """See `GradientSync`; the optimizers' steps are shared out.

    Args:
        modules: which stay as they are.
        group: the ranks; its process group has to be torch's default group.
        optimizers: of whose parameters each rank steps its rows. Scalars and complex parameters
            are stepped alike on every rank, and so is all that an optimizer holds which
            evaluates the loss within its step.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        group: Group,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        bucket_cap_mb: float = 25,
        buffers: str = "after_backward",
        averages: bool = True,
    ) -> None:
        super().__init__(
            modules,
            group,
            bucket_cap_mb=bucket_cap_mb,
            buffers=buffers,
            averages=averages,
            make_transport=partial(BucketTransport, meet=partial(self._meet_at, _ROUND)),
        )
        self._mesh: DeviceMesh | None = None
        self._sharded: list[ShardedOptimizer] = []
        self._shards: dict[torch.Tensor, ShardOfParameter] = {}
        slots = self._rounds.slots
        self._splits = {slot.param: slot.number for slot in slots if has_rows(slot.param)}
        try:
            self._mesh = _mesh(group, slots[0].param.device)
            self._sharded += [
                ShardedOptimizer(optimizer, self)
                for optimizer in dict.fromkeys(optimizers)
                if not steps_whole(optimizer)
            ]
        except BaseException:
            self.detach()
            raise

    def shard_of(self, param: torch.Tensor) -> ShardOfParameter | None:
        """See `Rows`."""
        number = self._splits.get(param)
        if number is None or self._mesh is None:
            return None
        if param not in self._shards:
            self._shards[param] = ShardOfParameter(number, param, self._mesh)
        return self._shards[param]

    def state_in_shards(self, state: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
        """See `Rows`."""
        assert self._mesh is not None, "optimizers are released before it goes"
        return state_in_shards(state, param, self._mesh)

    def meet(self, optimizer: ShardedOptimizer) -> None:
        """See `Rows`: who left a step out would take its messages for those of a backward.

        Gradient:
            None: metadata only.

        Collective:
            Every rank. Blocks. See `Group.roll_call`.

        Raises:
            GradientNotReducedError: on every rank, if one is somewhere else; see `_meet_at`.
            PeerLostError: a rank did not come.
        """
        here = self._sharded.index(optimizer) if optimizer in self._sharded else len(self._sharded)
        try:
            self._meet_at(here)
        except LockstepError:
            self._rounds.break_off()
            raise

    def _meet_at(self, here: int) -> None:
        """Refuse to go on where one rank steps and another one does not.

        On accelerators, where the host would have to wait for the device, a rank that is missing
        is left to the backend's own timeout.
        """
        group = self._rounds.attached()
        if group.device.type != "cpu":
            return
        places = group.roll_call([here], "backward or step")
        if any(place != places[0] for place in places):
            raise GradientNotReducedError(
                "the ranks are at different places of a step",
                where=self._rounds.place,
                expected="the same backwards and the same optimizers' steps on every rank",
                got="; ".join(f"rank {r}: {_named(int(n))}" for r, [n] in enumerate(places)),
                cause="a step, or a backward, that some rank left out or has of its own",
                fix="step on every rank or on none, and the optimizers in the same order",
            )

    def gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the other ranks' rows with what those ranks have.

        Gradient:
            None: runs without recording.

        Collective:
            Every rank. Blocks. See `gather_rows`.

        Raises:
            PeerLostError: another rank went away; the ranks' weights are not equal any more.
        """
        if not tensors:
            return
        try:
            gather_rows(self._rounds.attached(), tensors, cap_bytes=self._cap_bytes)
        except PeerLostError:
            self._rounds.break_off()
            raise
        # Neither DTensor's operations nor a broadcast raise a version counter.
        torch.autograd.graph.increment_version(tensors)

    def detach(self) -> None:
        """As `GradientSync.detach`; of the optimizers' states each rank keeps its rows."""
        super().detach()
        for optimizer in self._sharded:
            optimizer.release()
        self._sharded.clear()
        self._shards.clear()
        if self._mesh is not None:
            # The states keep the mesh, and a mesh keeps its groups by name.
            getattr(self._mesh, "_pg_registry", {}).clear()
        self._mesh = None


def _named(place: int) -> str:
    return "a backward" if place == _ROUND else f"a step of optimizer {place}"


def _mesh(group: Group, device: torch.device) -> DeviceMesh:
    if not dist.is_initialized() or dist.get_world_size() != group.size:
        raise NotAvailableError(
            "sharding needs the workers' group to be torch's default process group",
            cause="this process has a default group of its own, or hosts a rank beside others",
            fix='leave out use_local, or sync="fsdp"',
        )
    world = dist.group.WORLD
    assert world is not None
    return DeviceMesh.from_group(world, device.type)
