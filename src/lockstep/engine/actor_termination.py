# SPDX-License-Identifier: Apache-2.0
"""Ends the processes of actors, and waits until they are gone."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.engine.worker_handle import WorkerHandle


def end_actor(actor: Any) -> None:
    """End an actor's process. `actor` is Any: Ray's annotations refuse Ray's own handles here."""
    ray.kill(actor, no_restart=True)


def kill_worker(handle: WorkerHandle, others: list[WorkerHandle]) -> None:
    """End a worker's process at once, also a process that is stopped or does not answer.

    `ray.kill` asks the process first: a stopped process lives on for seconds, in which its open
    sockets keep its peers waiting (measured: 5 s). SIGKILL does not ask.

    Args:
        others: workers, of which one on the same node sends the signal.
    """
    if handle.actor is None:
        return
    if handle.pid and handle.is_here:
        with suppress(ProcessLookupError):
            os.kill(handle.pid, signal.SIGKILL)
    elif handle.pid:
        # Only one worker sends the signal: after the first SIGKILL the pid may have been reused.
        on_its_node = (each for each in others if each.node == handle.node and each is not handle)
        for neighbour in on_its_node:
            if neighbour.actor is not None:
                neighbour.actor.kill_process.remote(handle.pid)
                break
    end_actor(handle.actor)


def wait_until_gone(pids: Iterable[int], at_most_s: float) -> None:
    """Wait until the processes `pids` have ended, for `at_most_s` seconds at most.

    `ray.kill` returns before the process has ended, and no process may outlive `shutdown`.
    """
    deadline = time.monotonic() + at_most_s
    for pid in pids:
        while time.monotonic() < deadline:
            try:
                os.kill(pid, 0)
            except (ProcessLookupError, PermissionError):
                break
            time.sleep(0.01)
