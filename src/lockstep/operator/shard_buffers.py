# SPDX-License-Identifier: Apache-2.0
"""Keeps what a forward changes (running statistics) independent of the sharding.

Every shard of a step starts from the buffers that the last step committed, and the step commits
the buffers of shard 0, as DDP keeps rank 0's. Otherwise a worker with two shards would chain
their statistics, and the result would depend on which worker had which shard. A shard of
weight zero (without tokens) leaves the buffers unchanged. Of weights see `ShardWeights`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.sync import buffer_places, copy_buffers, put_buffers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import nn

    from lockstep.operator.shard_weights import ShardWeights
    from lockstep.sync import Synchroniser


class ShardBuffers:
    """The buffers of `modules` during one step of a worker.

    Args:
        num_shards: shards that this worker computes in this step.
        sync: broadcasts rank 0's buffers at the end; None for a worker without peers.
        weights: put back together with the buffers.
        keeps_committed: the committed buffers may be needed: a shard may turn out to have weight
            zero, or is computed twice.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        num_shards: int,
        sync: Synchroniser | None,
        weights: ShardWeights,
        *,
        keeps_committed: bool = False,
    ) -> None:
        self._sync = sync
        self._weights = weights
        self._has_several_shards = num_shards > 1
        # One shard is the common case, and walking through the modules is not free.
        looks = self._has_several_shards or keeps_committed
        self._places = buffer_places(modules) if looks else []
        self._before = self._copies()
        self._first: list[torch.Tensor | None] = []

    def begin_shard(self, position: int) -> None:
        """Before the forward of shard number `position`: put buffers and weights back."""
        if position > 0:
            self.put_committed()

    def put_committed(self) -> None:
        """Put the committed buffers back, and the weights that forwards write."""
        self._put(self._before)
        self._weights.put_committed()

    def after_forward(self) -> None:
        """After a shard's forward, before its backward; see `ShardWeights.after_forward`."""
        self._weights.after_forward()

    def end_shard(self, position: int, *, counts: bool) -> None:
        """After the backward of shard number `position`: keep the buffers of the first shard.

        Args:
            counts: the shard's weight is not zero.
        """
        if position > 0:
            return
        if not counts:
            self._first = self._before
        elif self._has_several_shards:
            self._first = self._copies()

    def after_shard(self, *, counts: bool) -> list[torch.Tensor | None]:
        """Copies of the buffers after a backward; the committed ones if the shard has no weight."""
        return self._copies() if counts else self._before

    def replace(self, values: Sequence[torch.Tensor | None]) -> None:
        """Let `values`, of another worker, be the buffers of the first shard."""
        held = [place.tensor() for place in self._places]
        self._first = [
            value if value is None or now is None else value.to(now.device)
            for value, now in zip(values, held, strict=True)
        ]

    def commit(self) -> None:
        """After the last backward of the step: commit shard 0's buffers on all ranks.

        Collective:
            Every rank: one broadcast if there are buffers.
        """
        if self._first:
            self._put(self._first)
        if self._sync is not None:
            self._sync.broadcast_buffers()

    def _copies(self) -> list[torch.Tensor | None]:
        return [value for _, value in copy_buffers(self._places)]

    def _put(self, values: list[torch.Tensor | None]) -> None:
        put_buffers(list(zip(self._places, values, strict=True)))


class BufferSnapshot:
    """The values that the buffers of `modules` had before an accumulation window.

    A state that is saved within the window goes on from its start, and the forwards that are
    done again then change the buffers again.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._by_module = [
            # A `state_dict` has a buffer that modules share under each of its names.
            {
                name: buffer.detach().clone()
                for name, buffer in module.named_buffers(remove_duplicate=False)
            }
            for module in modules
        ]

    def put_into(self, states: Iterable[dict[str, Any] | None]) -> None:
        """Put the values into the modules' `state_dict`s, in the same order, on the CPU."""
        for buffers, state in zip(self._by_module, states, strict=False):
            if state is not None:
                own = {key: held for key, held in buffers.items() if key in state}
                state.update({key: held.to("cpu", copy=True) for key, held in own.items()})
