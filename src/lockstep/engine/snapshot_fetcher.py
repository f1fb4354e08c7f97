# SPDX-License-Identifier: Apache-2.0
"""Fetches snapshots of the run's state from rank 0's node to the driver.

The driver calls a method in the actor's `control` concurrency group, which runs while training
does, and gets the latest snapshot or None. It asks again after each answer, and never blocks for an
answer during a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.exceptions import GetTimeoutError, RayError

import ray
from lockstep.engine.keyboard_interrupt import reraise_keyboard_interrupt
from lockstep.engine.ray_errors import ACTOR_DEATHS
from lockstep.engine.watched_wait import wait_for_answers
from lockstep.serialization import join
from lockstep.worker import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.engine.engine_protocol import SnapshotKeeper
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import Worker


class RemoteSnapshotFetcher:
    """A `SnapshotFetcher` for workers in actors.

    Args:
        rank_0: returns the worker that takes snapshots now; None where no worker is left.
        to: receives the snapshots.
        end_stopped_workers: see `Engine`.
    """

    def __init__(
        self,
        rank_0: Callable[[], WorkerHandle | None],
        to: SnapshotKeeper,
        end_stopped_workers: Callable[[], None],
    ) -> None:
        self._rank_0 = rank_0
        self._to = to
        self._end_stopped_workers = end_stopped_workers
        self._is_requested = False
        self._asked: Any = None
        self._asked_by_request = False  # and not because a copy may be due

    def request(self) -> None:
        self._is_requested = True
        if (here := self._worker_in_driver()) is not None:
            here.snapshots.request()

    def on_call_start(self) -> None:
        """Called before each remote call: a rank 0 in the driver hands snapshots directly to
        `to`."""
        if (here := self._worker_in_driver()) is not None:
            here.snapshots.give = self._to.keep

    def _worker_in_driver(self) -> Worker | None:
        first = self._rank_0()
        return None if first is None else first.worker

    def poll(self) -> None:
        """Receive a snapshot that has arrived, and request the next one; never blocks."""
        if self._asked is not None:
            if not ray.wait([self._asked], timeout=0)[0]:
                return
            self._receive()
        first = self._rank_0()
        if first is not None and first.actor is not None:
            # A signal's request may come in between: it is for the next snapshot then.
            self._asked_by_request, self._is_requested = self._is_requested, False
            self._asked = first.actor.snapshot.remote(self._asked_by_request)

    def drop(self) -> None:
        """See `SnapshotFetcher`."""
        self._asked = None

    def finish(self, timeout_s: float | None = None) -> None:
        """See `SnapshotFetcher`."""
        if self._asked is not None:
            self._wait_and_receive(timeout_s)
        self.poll()
        if self._asked is not None:
            self._wait_and_receive(timeout_s)

    def _wait_and_receive(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            wait_for_answers([self._asked], self._end_stopped_workers)
        self._receive(timeout_s)

    @reraise_keyboard_interrupt()
    def _receive(self, timeout_s: float | None = None) -> None:
        try:
            answer = ray.get(self._asked, timeout=timeout_s)
        except GetTimeoutError:
            return  # the answer is still on its way, as after Ctrl-C in here: rank 0 gives it once
        except ACTOR_DEATHS:
            # The worker is gone, and its snapshot; the pending call reports the death.
            self._is_requested = self._is_requested or self._asked_by_request
        except RayError as error:
            self._to.note_failure(error)
        else:
            if answer is not None:
                step, call, structure, arrays = answer
                self._to.keep(Snapshot(step, join(structure, arrays), call=call))
        self._asked = None
