# SPDX-License-Identifier: Apache-2.0
"""`SingleProcess`: one process and plain autograd, the reference for `GradientSync`.

It shares no code with that class on purpose. No hooks, no buckets, no communication: a backward is
torch's, and a window of weighted backwards is their weighted mean, as one writes it by hand.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lockstep._torch_compat import version_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from lockstep.errors import WeightError
    from lockstep.group import Group
    from lockstep.sync.shard_tree_sum import ShardOrder


class SingleProcess:
    """Has the methods of `GradientSync`, without peers.

    Args:
        modules: the trained modules.
        averages: False if the losses are sums over their batches.

    Attributes:
        rounds: windows closed.
    """

    communicates_in_forward = False
    units: Sequence[str] = ()

    def __init__(self, modules: Sequence[torch.nn.Module], *, averages: bool) -> None:
        self._parameters = [p for module in modules for p in module.parameters()]
        self._averages = averages
        self._weight: float | None = None
        self._earlier: list[torch.Tensor | None] = []
        self._hidden: list[torch.Tensor | None] | None = None
        self._is_paused = False
        self._watched: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.rounds = 0

    @property
    def needs_guard(self) -> bool:
        return False

    @property
    def has_open_window(self) -> bool:
        return self._weight is not None or self._hidden is not None

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, **backward_kwargs: Any
    ) -> None:
        """Torch's backward; in a window of `no_sync`, its part of the weighted mean.

        Gradient:
            sum over the window of weight * d loss / sum of weights, added to earlier gradients.

        Collective:
            None.
        """
        self._show_gradients()
        is_whole = self._weight is None and not self._is_paused
        if weight is None or is_whole or not self._averages:
            if weight != 0:
                loss.backward(**backward_kwargs)
            return
        if self._weight is None:
            self._weight = 0.0
            self._earlier = [parameter.grad for parameter in self._parameters]
            self._set_gradients([None] * len(self._parameters))
        if weight:
            self._weight += weight
            (loss * weight).backward(**backward_kwargs)
        else:
            self._mark_used(loss, backward_kwargs)
        if not self._is_paused:
            self.reduce_pending()

    def _mark_used(self, loss: torch.Tensor, backward_kwargs: dict[str, Any]) -> None:
        """Parameters that a loss of weight zero has used get zero gradients, NaN or not."""
        before = [parameter.grad for parameter in self._parameters]
        self._set_gradients([None] * len(before))
        loss.backward(**backward_kwargs)
        used = [parameter.grad for parameter in self._parameters]
        self._set_gradients(
            [
                torch.zeros_like(new) if grad is None and new is not None else grad
                for grad, new in zip(before, used, strict=True)
            ]
        )

    def reduce_pending(self) -> None:
        """Close the window: divide once by all its weights.

        Gradient:
            As after the last backward of a window.

        Collective:
            None.
        """
        self._show_gradients()
        if self._weight is None:
            return
        sums = [parameter.grad for parameter in self._parameters]
        weight, earlier = self._weight or 1.0, self._earlier
        self.forget_window()
        means = [None if grad is None else grad / weight for grad in sums]
        self._set_gradients([_add(*pair) for pair in zip(earlier, means, strict=True)])
        self.rounds += 1

    def forget_window(self) -> None:
        """Drop the gradients of the open window."""
        self._weight, self._earlier, self._hidden = None, [], None
        self._set_gradients([None] * len(self._parameters))

    def keep_window(self) -> None:
        """See `GradientSync.keep_window`."""
        self._show_gradients()
        self._hidden = [parameter.grad for parameter in self._parameters]
        self._set_gradients([None] * len(self._parameters))

    def _show_gradients(self) -> None:
        hidden, self._hidden = self._hidden, None
        if hidden is not None:
            mine = [parameter.grad for parameter in self._parameters]
            self._set_gradients([_add(*pair) for pair in zip(hidden, mine, strict=True)])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Weights add up until the next backward outside.

        Gradient:
            Not the mean yet.

        Collective:
            None.
        """
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _set_gradients(self, grads: Sequence[torch.Tensor | None]) -> None:
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad

    def watch_gradients(self) -> None:
        """See `GradientSync.watch_gradients`; a weak reference lets a cleared gradient go."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        self._watched = [(weakref.ref(grad), version_of(grad)) for grad in grads]

    @property
    def has_added(self) -> bool:
        held = {id(p.grad) for p in self._parameters if p.grad is not None}
        alive = [(grad, version) for ref, version in self._watched if (grad := ref()) is not None]
        return any(id(grad) in held and version_of(grad) != version for grad, version in alive)

    # Methods of `GradientSync` that only ranks with peers need.

    def begin_step(self, step: int) -> None: ...

    def set_undo_point(self, step: int | None) -> None: ...

    def has_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return False

    def set_delivered_weight(self, weight: float | WeightError | None) -> None: ...

    def take_shard(self, shard: int) -> None: ...

    def set_shard_order(self, order: ShardOrder) -> None: ...

    def last_shard(self, shard: int) -> AbstractContextManager[None]:
        return nullcontext()

    def expect_weight(self, total: float | None) -> None: ...

    def broadcast_buffers(self) -> None: ...

    def broadcast_weights(
        self, written: Sequence[torch.Tensor], *, has_written: bool
    ) -> list[torch.Tensor]:
        return []

    def agree_on_values(self) -> None: ...

    def leave_group(self) -> bool:
        return True

    def join_group(self, group: Group) -> None: ...

    def detach(self) -> None: ...


def _add(earlier: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if earlier is None or new is None:
        return new if earlier is None else earlier
    return earlier + new
