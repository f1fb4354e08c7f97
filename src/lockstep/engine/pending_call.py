# SPDX-License-Identifier: Apache-2.0
"""What the driver hears from the ranks of one call, and what it makes of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import cloudpickle
from ray.exceptions import RayActorError

import ray
from lockstep.engine.actor_failures import ctrl_c_as_itself, reason_of
from lockstep.engine.base import COLLECTIVE_METHODS, METHODS_BESIDE
from lockstep.errors import LockstepError, WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.engine.server_actor import ServerProcess
    from lockstep.worker import Outcome, WorkerStatus

WATCH_S = 0.2
"""How often somebody who watches a call is told of its progress."""

# Long enough for a cause to arrive after its consequence (measured: milliseconds apart).
_HEARING_S = 2.0

# A plain RuntimeError may come from a collective of the user's own that lost its peer; the
# notice of a process's death takes up to two tenths of a second.
_NOTICE_S = 1.0


class PendingCall:
    """Answers by rank; of the failures, which one caused the others.

    Args:
        method: what the workers were asked to do.
        server: the parameter server that they need for it, if there is one.
        hears_all: a worker's death ends nothing: wait until everybody else has answered.

    Attributes:
        pending: the ranks that have not answered, by what to wait for.
        values: what ranks answered.
        deaths: the ranks whose process died.
        lost_peers: the ranks that only say that another one went away.
        failed_at: when the first failure was heard (`time.monotonic`).
        here: tells where rank 0 in this process is, while it performs.
    """

    def __init__(
        self, method: str, server: ServerProcess | None = None, *, hears_all: bool
    ) -> None:
        self.method = method
        self._server = server
        self._hears_all = hears_all
        self.pending: dict[Any, int] = {}
        self.values: dict[int, Any] = {}
        self.deaths: dict[int, WorkerDiedError] = {}
        self.lost_peers: dict[int, BaseException] = {}
        self.failed_at: float | None = None
        self.here: Callable[[], WorkerStatus] | None = None
        self._causes: list[BaseException] = []

    @property
    def has_failed(self) -> bool:
        """Somebody could not do what was asked."""
        return bool(self._causes or self.deaths or self.lost_peers)

    @property
    def is_recoverable(self) -> bool:
        """All that failed may have failed because a worker went away."""
        return not self._causes or (bool(self.deaths) and not self._has_plain_cause)

    @property
    def _has_plain_cause(self) -> bool:
        return any(map(_is_plain, self._causes))

    def heard(self, rank: int, outcome: Outcome) -> None:
        error = outcome.exception()
        if error is None:
            self.values[rank] = cloudpickle.loads(outcome.value)
        else:
            self.failed(rank, error, peer_lost=outcome.peer_lost)

    def failed(self, rank: int, error: BaseException, *, peer_lost: bool) -> None:
        self.failed_at = self.failed_at or time.monotonic()
        if peer_lost:
            self.lost_peers[rank] = error
        else:
            self._causes.append(error)

    @ctrl_c_as_itself()
    def listen(self, look: Callable[[], None] | None) -> None:
        """Until all have answered, or a cause is known, or a consequence waited long enough.

        Args:
            look: called while nothing is heard, every `WATCH_S`.
        """
        deadline: float | None = None
        while self.pending:
            wait_s = self._patience()
            if wait_s is not None and deadline is None:
                deadline = time.monotonic() + wait_s
            if deadline is not None and time.monotonic() >= deadline:
                break
            timeout = WATCH_S if look is not None or deadline is not None else None
            ready, _ = ray.wait([*self.pending, *self._servers()], num_returns=1, timeout=timeout)
            for ref in ready:
                if ref in self.pending:
                    self._answer(ref, self.pending.pop(ref))
                else:
                    self._server_ended()
            if look is not None and not ready:
                look()
        self._hear_of_the_server()

    def _patience(self) -> float | None:
        """Seconds to go on listening for; None without end."""
        together = self.method in COLLECTIVE_METHODS
        if self._hears_all and self.is_recoverable:
            return None
        if self._causes and together:
            return _NOTICE_S if self._hears_all and not self._has_plain_cause else 0.0
        if self.deaths:
            return 0.0
        is_freed = self.method in METHODS_BESIDE
        return None if is_freed or not self.has_failed else _HEARING_S

    def _answer(self, ref: Any, rank: int) -> None:
        try:
            self.heard(rank, ray.get(ref))
        except RayActorError as error:
            died = WorkerDiedError(
                f"the process of rank {rank} died during {self.method}",
                where=f"rank {rank}",
                cause=reason_of(error),
                fix="look for the reason above (out of memory? killed?), then build a new"
                " trainer and load the last checkpoint",
            )
            died.__cause__ = error
            self.failed_at = self.failed_at or time.monotonic()
            self.deaths[rank] = died

    def _servers(self) -> list[Any]:
        """The server's end says something where workers need it: not to who only reads weights."""
        needed = self.method in COLLECTIVE_METHODS or self.lost_peers
        return [self._server.ends] if self._server is not None and needed else []

    def _hear_of_the_server(self) -> None:
        """The workers may have noticed its death before the notice of it is here."""
        servers = self._servers()
        if self.lost_peers and not self._causes and not self.deaths and servers:
            ready, _ = ray.wait(servers, timeout=_HEARING_S)
            if ready:
                self._server_ended()

    def _server_ended(self) -> None:
        died = self._server.death() if self._server is not None else None
        self._server = None
        if died is not None:
            self._causes.append(died)

    def cause(self) -> BaseException | None:
        """The failure to speak of, if there is one."""
        found = [*self._causes, *self.deaths.values(), *self.lost_peers.values()]
        return next(iter(found), None)


def _is_plain(error: BaseException) -> bool:
    """No collective raises it."""
    return isinstance(error, LockstepError) or not isinstance(error, RuntimeError)
