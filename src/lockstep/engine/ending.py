# SPDX-License-Identifier: Apache-2.0
"""Whether a call on an actor failed, and when a process is gone."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.worker import Outcome


def has_failed(ref: Any) -> bool:
    try:
        outcome: Outcome = ray.get(ref)
    # Whatever ended the actor or its call: the cause is sorted out where the call is heard.
    except Exception:
        return True
    return outcome.error is not None


def wait_until_gone(pids: Iterable[int], at_most_s: float) -> None:
    """`ray.kill` returns before the process has ended; nothing may outlive `shutdown`."""
    deadline = time.monotonic() + at_most_s
    for pid in pids:
        while time.monotonic() < deadline:
            try:
                os.kill(pid, 0)
            except (ProcessLookupError, PermissionError):
                break
            time.sleep(0.01)
