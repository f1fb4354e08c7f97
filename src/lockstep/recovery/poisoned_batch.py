# SPDX-License-Identifier: Apache-2.0
"""Detects a batch that kills each worker that computes it, before it has killed all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_DEATHS: Final = 3
"""Deaths that one shard of one step may cause: the first worker and two replacements."""


class DeathsByShard:
    """Counts deaths at one step of one call, by the shards that the dead workers computed.

    A death at another step begins the count anew. So does another call, for several validations
    after one step of training begin at the same step.
    """

    def __init__(self) -> None:
        self._step: tuple[str, int, int] | None = None
        self._by_shard: dict[int, int] = {}

    def count_death(self, step: tuple[str, int, int], shards: Iterable[int]) -> list[int]:
        """Count the death of a worker that computed `shards` in `step`.

        Returns:
            The shards that have caused `MAX_DEATHS` deaths.
        """
        if step != self._step:
            self._step, self._by_shard = step, {}
        shards = list(shards)
        for shard in shards:
            self._by_shard[shard] = self._by_shard.get(shard, 0) + 1
        return [shard for shard in shards if self._by_shard[shard] >= MAX_DEATHS]
