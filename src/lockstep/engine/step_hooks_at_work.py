# SPDX-License-Identifier: Apache-2.0
"""Lets the hooks of a worker in the driver's process act while the worker performs a call.

The user's program has the same objects (`from_model`, `get_local_operator`), and may step them in a
loop of its own between two calls, or when it has forgotten the trainer without a `shutdown`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.worker import Worker


@contextmanager
def step_hooks_at_work(worker: Worker) -> Iterator[None]:
    """Inside, hooks on optimizers' steps act; behind it a step is none of the run's."""
    if worker.step_hooks is not None:
        worker.step_hooks.is_at_work = True
    try:
        yield
    finally:
        # In the first call, `start`, the worker makes them.
        if worker.step_hooks is not None:
            worker.step_hooks.is_at_work = False
