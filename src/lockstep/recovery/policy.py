# SPDX-License-Identifier: Apache-2.0
"""`Policy`: the limits within which a run goes on after a loss of workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """The limits within which a run goes on after a loss of workers.

    Attributes:
        min_workers: the fewest workers with which the run goes on.
        hang_timeout_s: how long a worker may stay at one step while others wait for it.
    """

    min_workers: int
    hang_timeout_s: float
