# SPDX-License-Identifier: Apache-2.0
"""How much a run may lose and still go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """How much may be lost.

    Attributes:
        min_workers: the run does not go on with fewer.
        hang_timeout_s: how long a worker may stay at one step while others wait for it.
    """

    min_workers: int
    hang_timeout_s: float
