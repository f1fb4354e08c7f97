# SPDX-License-Identifier: Apache-2.0
"""What the driver hears from the ranks of one call, and what it makes of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import cloudpickle
from ray.exceptions import RayActorError

import ray
from lockstep.engine.base import COLLECTIVE_METHODS, METHODS_BESIDE
from lockstep.errors import WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.engine.server import ServerProcess
    from lockstep.worker import Outcome

WATCH_S = 0.2
"""How often somebody who watches a call is told of its progress."""

# Long enough for a cause to arrive after its consequence (measured: milliseconds apart).
_HEARING_S = 2.0


class Hearing:
    """Answers by rank; of the failures, which one caused the others.

    Args:
        method: what the workers were asked to do.
        server: the parameter server that they need for it, if there is one.
    """

    def __init__(self, method: str, server: ServerProcess | None = None) -> None:
        self.method = method
        self._server = server
        self.pending: dict[Any, int] = {}
        self.values: dict[int, Any] = {}
        self.dead = False
        self._causes: list[BaseException] = []
        self._consequences: list[BaseException] = []

    def heard(self, outcome: Outcome) -> None:
        error = outcome.exception()
        if error is None:
            self.values[outcome.rank] = cloudpickle.loads(outcome.value)
        else:
            self.failed(error, peer_lost=outcome.peer_lost)

    def failed(self, error: BaseException, *, peer_lost: bool) -> None:
        (self._consequences if peer_lost else self._causes).append(error)

    def listen(self, look: Callable[[], None] | None) -> None:
        """Until all have answered, or a cause is known, or a consequence waited long enough."""
        deadline: float | None = None
        while self.pending:
            if self._causes and (self.method in COLLECTIVE_METHODS or self.dead):
                return
            is_freed = self.method in METHODS_BESIDE and not self.dead
            if (self._causes or self._consequences) and deadline is None and not is_freed:
                deadline = time.monotonic() + _HEARING_S
            if deadline is not None and time.monotonic() > deadline:
                return
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

    def _answer(self, ref: Any, rank: int) -> None:
        try:
            self.heard(ray.get(ref))
        except RayActorError as error:
            self.dead = True
            died = WorkerDiedError(
                f"the process of rank {rank} died during {self.method}",
                where=f"rank {rank}",
                cause=_first_lines(str(error)),
                fix="look for the reason above (out of memory? killed?), then build a new"
                " trainer and load the last checkpoint",
            )
            died.__cause__ = error
            self.failed(died, peer_lost=False)

    def _servers(self) -> list[Any]:
        """The server's end says something where workers need it: not to who only reads weights."""
        needed = self.method in COLLECTIVE_METHODS or self._consequences
        return [self._server.ends] if self._server is not None and needed else []

    def _hear_of_the_server(self) -> None:
        """The workers may have noticed its death before the notice of it is here."""
        servers = self._servers()
        if self._consequences and not self._causes and servers:
            ready, _ = ray.wait(servers, timeout=_HEARING_S)
            if ready:
                self._server_ended()

    def _server_ended(self) -> None:
        died = self._server.death() if self._server is not None else None
        self._server = None
        if died is not None:
            self.failed(died, peer_lost=False)

    def cause(self) -> BaseException | None:
        return next(iter([*self._causes, *self._consequences]), None)


def _first_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:count])
