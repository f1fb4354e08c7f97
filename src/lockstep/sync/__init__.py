# SPDX-License-Identifier: Apache-2.0
"""How N gradients become one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lockstep.sync.attach import replicate as replicate
from lockstep.sync.average import average_gradients as average_gradients
from lockstep.sync.gradient_sync import GradientSync as GradientSync
from lockstep.sync.ownership import is_local as is_local
from lockstep.sync.ownership import local as local
from lockstep.sync.shard_order import ShardOrder as ShardOrder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

__all__ = [
    "GradientSync",
    "ShardOrder",
    "Synchroniser",
    "average_gradients",
    "is_local",
    "local",
    "replicate",
]


class Synchroniser(Protocol):
    """A way in which N gradients become one, as the worker and the operator use it.

    After a `backward` outside `no_sync`, or after `reduce_pending`, ``parameter.grad`` is the
    gradient of the global objective on every rank that will step.
    """

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, **backward_kwargs: Any
    ) -> None:
        """Run backward through `loss`, which counts `weight`, and reduce."""

    def set_delivered_weight(self, weight: float | None) -> None:
        """Say what the batch counts for whose plain ``loss.backward()`` comes next."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate without communicating."""

    def reduce_pending(self) -> None:
        """Take part in the peers' reduction with what is there, or with nothing."""

    def broadcast_buffers(self) -> None:
        """Make every rank's buffers equal to rank 0's."""

    def detach(self) -> None:
        """Let go of the parameters and of the group. Idempotent, works after a failure."""
