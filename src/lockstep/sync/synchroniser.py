# SPDX-License-Identifier: Apache-2.0
"""What the worker and the operator ask of a way in which N gradients become one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from lockstep.errors import WeightError
    from lockstep.group import Group


class Synchroniser(Protocol):
    """A way in which N gradients become one.

    After a `backward` outside `no_sync`, or after `reduce_pending`, the gradient that the
    optimizers of every rank will consume is that of the global objective. A way that cannot
    give it raises, with a code, before an optimizer steps.

    Attributes:
        rounds: how many reductions there have been.
    """

    rounds: int

    @property
    def needs_guard(self) -> bool:
        """Whether there are peers, so that a gradient of this rank alone is not the whole."""

    @property
    def has_open_window(self) -> bool:
        """Gradients have arrived since the last round."""

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, **backward_kwargs: Any
    ) -> None:
        """Run backward through `loss`, which counts `weight`, and reduce."""

    def expect_weight(self, total: float | None) -> None:
        """Say what all ranks' batches of a usual step count for together, if that is known."""

    def begin_step(self, step: int) -> None:
        """Say which optimizer step the backwards from now on belong to."""

    def may_go_back_to(self, step: int | None) -> None:
        """Say what an interruption from now on leads back to.

        Args:
            step: steps of the run that had happened; None: what happens now stays.
        """

    def has_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it steps elsewhere, where its state is, and is taken back."""

    def set_delivered_weight(self, weight: float | WeightError | None) -> None:
        """Say what the batch counts for whose plain ``loss.backward()`` comes next."""

    def delivered_weight(self) -> float | None:
        """What `set_delivered_weight` was given last; raised, if it was an error."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate without communicating."""

    def reduce_pending(self) -> None:
        """Take part in the peers' reduction with what is there, or with nothing."""

    def forget_window(self) -> None:
        """Drop the gradients that were accumulated since the last round."""

    def watch_gradients(self) -> None:
        """From now on, `has_added` says whether a backward has added to gradients that are there.

        To those that no later round has left, and that nobody has cleared or zeroed meanwhile.
        """

    @property
    def has_added(self) -> bool: ...

    def take_shard(self, shard: int) -> None:
        """The backwards since the last call were those of `shard`; only under a shard order."""

    def last_shard(self, shard: int) -> AbstractContextManager[None]:
        """Inside, the backward of this rank's last shard reduces; only under a shard order."""

    def broadcast_buffers(self) -> None:
        """Make every rank's buffers equal to rank 0's."""

    def agree_on_values(self) -> None:
        """Raise on every rank, or on none, if the replicas' parameters differ."""

    def part(self) -> bool:
        """Leave a group that has broken.

        Returns:
            Whether this can `join` another one. Otherwise it is detached, and another
            attachment has to be made.
        """

    def join(self, group: Group) -> None:
        """After `part`: belong to `group`, whose ranks hold the same values."""

    def detach(self) -> None:
        """Let go of the parameters and of the group. Idempotent, works after a failure."""
