# SPDX-License-Identifier: Apache-2.0
"""`wait_for_answers`: a wait for workers outside of a call, in which they are watched as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from lockstep.engine.keyboard_interrupt import reraise_keyboard_interrupt
from lockstep.engine.pending_call import POLL_EVERY_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ray import ObjectRef


@reraise_keyboard_interrupt()
def wait_for_answers(
    answers: Sequence[ObjectRef[Any]], end_stopped_workers: Callable[[], None]
) -> None:
    """Wait until all `answers` are there; that of a worker that died is its death.

    A stopped process never answers, and there is no limit for one that writes to a slow disk.

    Args:
        end_stopped_workers: called every `POLL_EVERY_S` meanwhile.
    """
    left = list(answers)
    while left:
        _, left = ray.wait(left, num_returns=len(left), timeout=POLL_EVERY_S)
        if left:
            end_stopped_workers()
