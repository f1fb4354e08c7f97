# SPDX-License-Identifier: Apache-2.0
"""`DDPSync`: gradient sync in which torch's DistributedDataParallel wraps each model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.sync.ddp_transport import DDPTransport
from lockstep.sync.ddp_wrapper import parse_ddp_args
from lockstep.sync.gradient_sync import GradientSync

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from lockstep.group import Group
    from lockstep.sync.buckets import Slot
    from lockstep.sync.transport_protocol import RoundController, Transport


class DDPSync(GradientSync):
    """See `GradientSync`; gradients are reduced if they come out of the wrappers' forwards.

    Args:
        modules: those that have something to train are wrapped.
        group: the ranks.
        ddp_args: for DDP; see `parse_ddp_args`.

    Attributes:
        models: the wrapped modules, for use instead of the modules, in their order.
    """

    models: list[torch.nn.Module]

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        group: Group,
        *,
        ddp_args: Mapping[str, Any],
        bucket_cap_mb: float = 25,
        buffers: str = "after_backward",
        averages: bool = True,
    ) -> None:
        arguments = {"bucket_cap_mb": bucket_cap_mb, **parse_ddp_args(ddp_args)}
        forward_buffers = arguments.get("forward_sync_buffers", True)
        self._keeps_buffers = bool(arguments.get("broadcast_buffers", forward_buffers))

        def make_transport(
            controller: RoundController, slots: Sequence[Slot], _signature: int, _cap_bytes: int
        ) -> Transport:
            transport = DDPTransport(controller, slots, modules, arguments)
            self.models = transport.models
            return transport

        super().__init__(
            modules,
            group,
            bucket_cap_mb=bucket_cap_mb,
            buffers=buffers if self._keeps_buffers else "manual",
            averages=averages,
            make_transport=make_transport,
            settings={name: repr(arguments[name]) for name in sorted(arguments)},
        )

    def broadcast_buffers(self) -> None:
        """Overwrite every rank's buffers with rank 0's, unless ``ddp_args`` say not to.

        Gradient:
            None: buffers have none.

        Collective:
            Every rank. Blocks. One broadcast.
        """
        if self._keeps_buffers:
            super().broadcast_buffers()
