# SPDX-License-Identifier: Apache-2.0
"""`FSDPSync`: each rank steps its share of the parameters, and holds that optimizer state alone.

Weights and gradients are whole on every rank and synchronised as in `GradientSync`; the modules
keep their own parameters. The work and the state of the optimizers are sharded, by rows (ZeRO,
stage 1).

Rejected for this form: torch's `fully_shard`, which `ShardedSync` builds on. It exchanges a
module's parameters for others whenever it gathers or gives up weights, so that a list of parameters
from before a backward is stale after it; and within a step whole weights and whole gradients are
needed at once in any case, because its own reduce-scatter averages over ranks, mixes the gradients
of different layers when branches differ, gives zeros to parameters that no rank used, and needs
every rank to run the same forwards and backwards.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from lockstep._torch_compat.device_mesh import make_mesh
from lockstep.errors import (
    GradientNotReducedError,
    LockstepError,
    NotAvailableError,
    PeerLostError,
)
from lockstep.local_rows import rows_of
from lockstep.sync.bucket_transport import BucketTransport
from lockstep.sync.gradient_sync import GradientSync
from lockstep.sync.parameter_shards import ParameterShards
from lockstep.sync.sharded_optimizer import ShardedOptimizer, needs_whole_step
from lockstep.sync.tensor_broadcast import broadcast_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.group import Group


_ROUND: Final = -1
"""The place at the end of a backward; an optimizer's step is a place with its number."""


class FSDPSync(GradientSync):
    """See `GradientSync`; the optimizers' steps are sharded.

    Args:
        modules: stay as they are.
        group: the ranks; its process group has to be torch's default group.
        optimizers: each rank steps its rows of their parameters. Scalars and complex parameters
            are stepped alike on every rank, and so are all parameters of an optimizer that
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
            make_transport=partial(
                BucketTransport,
                wait_for_peers=partial(self._wait_for_peers, _ROUND),
                steps_alike=False,
            ),
        )
        self._sharded: list[ShardedOptimizer] = []
        self._shards: ParameterShards | None = None
        slots = self._rounds.slots
        try:
            self._shards = ParameterShards(slots, mesh_of(group, slots[0].param.device))
            for optimizer in dict.fromkeys(optimizers):
                if not needs_whole_step(optimizer):
                    self.shard(optimizer)
        except BaseException:
            self.detach()
            raise

    def shard(self, optimizer: torch.optim.Optimizer) -> None:
        """Let each rank step its rows of what `optimizer` holds, until `detach`."""
        assert self._shards is not None, "detached"
        wait_for_peers = partial(self._wait_for_peers_at_step, len(self._sharded))
        sharded = ShardedOptimizer(
            optimizer, self._shards, wait_for_peers=wait_for_peers, gather=self._gather
        )
        self._sharded.append(sharded)

    def _wait_for_peers_at_step(self, number: int) -> None:
        try:
            self._wait_for_peers(number)
        except LockstepError:
            self._rounds.mark_broken()
            raise

    def _wait_for_peers(self, here: int) -> None:
        """Raise if the ranks are at different places: one in a step, another one in a backward.

        A rank that left a step out would read the messages of the step as those of a backward.
        Over a group that carries no CPU tensors (NCCL alone) the host would have to wait for the
        device, so there only the backend's own timeout finds a missing rank.

        Gradient:
            None: metadata only.

        Collective:
            Every rank. Blocks. See `Group.monitored_all_gather`.

        Raises:
            GradientNotReducedError: on every rank, if one is somewhere else.
            PeerLostError: a rank did not come.
        """
        group = self._rounds.attached_group()
        if group.device.type != "cpu":
            return
        # A rank may compute longer than `MONITORED_TIMEOUT_S` between two steps.
        places = group.monitored_all_gather([here], "backward or step", max_s=math.inf)
        if any(place != places[0] for place in places):
            raise GradientNotReducedError(
                "the ranks are at different places of a step",
                where=self._rounds.place,
                expected="the same backwards and the same optimizers' steps on every rank",
                got="; ".join(f"rank {r}: {_format_place(int(n))}" for r, [n] in enumerate(places)),
                cause="a step, or a backward, that some rank left out or has of its own",
                fix="step on every rank or on none, and the optimizers in the same order",
            )

    def _gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the other ranks' rows of whole `tensors` with the values of those ranks.

        Rejected: an all-gather. It needs memory for what it gathers, and on gloo as much again,
        which was more than the optimizer's state that sharding saves; on two CPUs it was no
        quicker.

        Gradient:
            None: runs without recording.

        Collective:
            Every rank. Blocks. From each rank one broadcast per large tensor, and per device and
            `bucket_cap_mb`.

        Raises:
            PeerLostError: another rank went away; the ranks' weights are not equal any more.
        """
        if not tensors:
            return
        group = self._rounds.attached_group()
        try:
            for source in range(group.size):
                rows = [rows_of(tensor.detach(), source, group.size) for tensor in tensors]
                broadcast_tensors(group, rows, cap_bytes=self._cap_bytes, source=source)
        except PeerLostError:
            self._rounds.mark_broken()
            raise
        # Neither DTensor's operations nor a broadcast raise a version counter.
        torch.autograd.graph.increment_version(tensors)

    def detach(self) -> None:
        """See `GradientSync.detach`; of the optimizers' states each rank keeps its rows."""
        super().detach()
        for optimizer in self._sharded:
            optimizer.release()
        self._sharded.clear()
        if self._shards is not None:
            self._shards.close()
        self._shards = None


def _format_place(place: int) -> str:
    return "a backward" if place == _ROUND else f"a step of optimizer {place}"


def mesh_of(group: Group, device: torch.device) -> DeviceMesh:
    """The mesh of torch's default group, see `require_default_group`."""
    require_default_group(group)
    world = dist.group.WORLD
    assert world is not None
    return make_mesh(world, device.type)


def require_default_group(group: Group) -> None:
    """Refuse ranks whose group is not torch's default one, of which a mesh has to be.

    Raises:
        NotAvailableError: it is another one.
    """
    if not dist.is_initialized() or dist.get_world_size() != group.size:
        raise NotAvailableError(
            "sharding needs the workers' group to be torch's default process group",
            cause="this process has a default group of its own, or hosts a rank beside others",
            fix='leave out use_local, or sync="fsdp"',
        )
