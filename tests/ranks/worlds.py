# SPDX-License-Identifier: Apache-2.0
"""The same training program in one process (plain autograd, the oracle) and on N ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from harness import cut, gradients
from lockstep.group import Group
from lockstep.sync import GradientSync, replicate

Loss = Callable[..., torch.Tensor]


class OneProcess:
    """The oracle: every row, plain autograd, nothing of lockstep."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.modules = modules
        self.seen: list[dict[str, torch.Tensor | None]] = []

    def step(self, loss: Loss, *tensors: torch.Tensor) -> None:
        """One backward through the mean over all rows."""
        loss(*tensors).backward()

    def accumulate(self, loss: Loss, batches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """One window: the mean over the rows of all micro-batches."""
        total = sum(len(batch[0]) for batch in batches)
        for batch in batches:
            (loss(*batch) * (len(batch[0]) / total)).backward()

    def note(self) -> None:
        """Remember the gradients that an optimizer would see now."""
        self.seen.append(gradients(*self.modules))

    def end(self) -> None:
        """Nothing to take off."""


class OnRanks(OneProcess):
    """One rank's part of every batch, through `GradientSync`."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        group: Group,
        shares: Sequence[float],
        *,
        way: str,
        cap_mb: float,
    ) -> None:
        super().__init__(modules)
        self.group = group
        self.shares = shares
        self.way = way
        self.sync: GradientSync = replicate(list(modules), group=group, bucket_cap_mb=cap_mb)

    def _mine(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        total = len(tensors[0])
        counts = [int(total * share) for share in self.shares]
        counts[0] += total - sum(counts)
        part = cut(total, counts)[self.group.rank]
        return [tensor[part] for tensor in tensors]

    def step(self, loss: Loss, *tensors: torch.Tensor) -> None:
        mine = self._mine(tensors)
        weight = len(mine[0])
        if weight == 0 and self.way != "borrowed":
            self.sync.reduce_pending()
            return
        if weight == 0:
            mine = [tensor[:1] * torch.nan for tensor in tensors]
        if self.way == "plain":
            self.sync.set_delivered_weight(weight)
            loss(*mine).backward()
        else:
            self.sync.backward(loss(*mine), weight=weight)

    def accumulate(self, loss: Loss, batches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        for place, batch in enumerate(batches):
            mine = self._mine(batch)
            is_last = place == len(batches) - 1
            if len(mine[0]) == 0:
                if is_last:
                    self.sync.reduce_pending()
            elif is_last:
                self.sync.backward(loss(*mine), weight=len(mine[0]))
            else:
                with self.sync.no_sync():
                    self.sync.backward(loss(*mine), weight=len(mine[0]))

    def end(self) -> None:
        self.sync.detach()
