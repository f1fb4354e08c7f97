# SPDX-License-Identifier: Apache-2.0
"""A batch that kills each worker that computes it: the run ends before it has killed them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_DEATHS: Final = 3
"""Deaths over the same shard of the same step: the first worker and two in its place."""


class DeathsByShard:
    """Deaths in one call, by the shards that the workers computed.

    Only deaths at the same step are held against each other. Of one call: several validations
    after one step of training begin at that step.
    """

    def __init__(self) -> None:
        self._step: tuple[str, int, int] | None = None
        self._by_shard: dict[int, int] = {}

    def count_death(self, step: tuple[str, int, int], shards: Iterable[int]) -> list[int]:
        """A worker that carried `shards` died in `step`; the shards that have killed too often."""
        if step != self._step:
            self._step, self._by_shard = step, {}
        shards = list(shards)
        for shard in shards:
            self._by_shard[shard] = self._by_shard.get(shard, 0) + 1
        return [shard for shard in shards if self._by_shard[shard] >= MAX_DEATHS]
