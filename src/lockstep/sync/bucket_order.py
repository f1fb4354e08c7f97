# SPDX-License-Identifier: Apache-2.0
"""`BucketOrder`: where the buckets of a round leave among the other collectives of a backward.

A bucket leaves as soon as it is full. Ranks need not fill it at the same moment: one of them takes
a branch that another one leaves out, or has a weight of zero and sends nothing before its backward
has ended. The buckets keep their order among themselves. But a collective of the program's own
(`torch.distributed.nn`, a SyncBatchNorm) or of another sync runs where autograd has come to it: a
bucket that left before it on one rank and leaves after it on another meets a foreign tensor, and
where the sizes are equal, both sums are wrong without an error.

A backend counts the collectives that it starts, whoever starts them. So each rank knows

- whether others run while buckets could leave. If so on any rank, all ranks send their buckets
  after the backward, in all later rounds: nothing can overtake there. The first backward sends
  nothing early, and so most programs are known before a bucket has left.
- how many of them followed each bucket that has left. The ranks compare a digest of this in every
  round, for collectives that run in a later backward for the first time: a difference is an error.

Gathers of lockstep hold the buckets back on every rank (`ExpectedExchange`), and do not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.expected_exchange import is_exchange_expected
from lockstep.group import Group

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class BucketOrder:
    """Counts the other collectives of the backward that runs.

    Args:
        group: the ranks.
        devices: where the buckets are.

    Attributes:
        group: the same.
        is_known: the group's backends count what they start.
    """

    def __init__(self, group: Group, devices: Iterable[torch.device]) -> None:
        self.group = group
        self._devices = list({device.type: device for device in devices}.values())
        self.is_known = all(group.started.on(device) is not None for device in self._devices)
        self.begin()

    def begin(self) -> None:
        """Note that a backward begins."""
        self._own = self._started = 0
        self._free_since: int | None = None
        self._before: list[int] = []  # of each own collective inside the backward: others before it

    def note_arrival(self) -> None:
        """Note that a gradient has arrived, in a backward in which no bucket leaves early."""
        if is_exchange_expected(self.group):
            self._free_since = None
        elif self._free_since is None:
            self._free_since = self._num_others()

    @property
    def has_watched(self) -> bool:
        """Whether `end` knows of others also if no bucket has left early."""
        return self._free_since is not None

    def before_departure(self) -> None:
        """Note that a bucket is about to leave."""
        self._started = self._num_started()

    def after_departure(self) -> None:
        """Note that the bucket has left: what was started meanwhile is its own."""
        num_own = self._num_started() - self._started
        self._before += [self._started - self._own] * num_own
        self._own += num_own

    def end(self) -> tuple[bool, list[int]]:
        """At the end of the backward, while the other buckets have not left.

        Returns:
            Whether others have run since a bucket could leave, or has left; and how many have
            followed each bucket, for those that any has followed.
        """
        since = self._free_since
        if since is None and self._before:
            since = self._before[0]
        if since is None:
            return False, []
        others = self._num_others()
        return others > since, [others - before for before in self._before if others > before]

    def close(self) -> None:
        """Forget the group."""
        self.group = Group(None)

    def _num_others(self) -> int:
        return self._num_started() - self._own

    def _num_started(self) -> int:
        started = 0
        for device in self._devices:
            started += self.group.started.on(device) or 0
        return started
