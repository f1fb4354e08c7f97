# SPDX-License-Identifier: Apache-2.0
"""`PendingCall`: the answers of ranks that perform a remote method, and the cause of a failure.

A consequence often arrives before its cause: a survivor's connection error arrives before the
error, or the notice of a death, that broke the connection. So after a failure the driver waits a
little longer, and only then names the failure that caused the others.
"""

from __future__ import annotations

import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import cloudpickle
from ray.exceptions import RayError

import ray
from lockstep.engine.keyboard_interrupt import reraise_keyboard_interrupt
from lockstep.engine.ray_errors import ACTOR_DEATHS, death_reason
from lockstep.error_texts import LOAD_LAST, first_line
from lockstep.errors import LockstepError, NotPicklableError, WorkerDiedError
from lockstep.worker import Communication

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.engine.parameter_server_actor import ServerHandle
    from lockstep.worker import CallContract, Outcome, WorkerStatus
    from ray import ObjectRef

R = TypeVar("R")

POLL_EVERY_S = 0.2
"""Seconds between two polls of the workers while a call runs."""

_LATE_S = 0.5
"""How long after a call's first answer the driver waits for relays: the cause of a failure may be
behind one of them."""

# A cause arrives milliseconds after its consequence (measured).
_WAIT_FOR_CAUSE_S = 2.0

# A plain RuntimeError may come from a collective of the user's own that lost its peer; the
# notice of a process's death takes up to two tenths of a second.
_WAIT_FOR_DEATH_S = 1.0


class PendingCall(Generic[R]):
    """Collects answers by rank, and decides which of several failures caused the others.

    Args:
        contract: the contract of the remote method that ranks perform.
        server: the parameter server that the method needs, if there is one.
        outlives_deaths: after a worker's death, wait until all other workers have answered.

    Attributes:
        pending: the ranks that the driver awaits an answer from, by the reference of the answer.
        relayed: the ranks that a relay answers for, by the reference of the relay's answer.
        ask: asks a rank for the answer that a relay has not brought.
        values: the results by rank.
        deaths: the errors of ranks whose process died.
        lost_peers: the errors of ranks that only report that another rank went away.
        failed_at: the time at which the driver received the first failure (`time.monotonic`).
        local_status: reads the status of rank 0 in the driver's process, while it performs.
    """

    def __init__(
        self, contract: CallContract, server: ServerHandle | None = None, *, outlives_deaths: bool
    ) -> None:
        self.contract = contract
        self._server = server
        self._outlives_deaths = outlives_deaths
        self.pending: dict[ObjectRef[Outcome], int] = {}
        self.relayed: dict[ObjectRef[list[Outcome | None]], Sequence[int]] = {}
        self.ask: Callable[[int], ObjectRef[Outcome]] | None = None
        self.values: dict[int, R] = {}
        self.deaths: dict[int, WorkerDiedError] = {}
        self.lost_peers: dict[int, BaseException] = {}
        self.failed_at: float | None = None
        self.local_status: Callable[[], WorkerStatus] | None = None
        self._latest_failure_at = 0.0
        self._answered_at: float | None = None
        self._causes: list[BaseException] = []

    @property
    def performing(self) -> list[int]:
        """The ranks that have not answered."""
        return [*self.pending.values(), *(rank for each in self.relayed.values() for rank in each)]

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed or died."""
        return bool(self._causes or self.deaths or self.lost_peers)

    @property
    def is_recoverable(self) -> bool:
        """Whether the loss of a worker may explain all failures."""
        return not self._causes or (bool(self.deaths) and not self._has_other_cause)

    @property
    def _has_other_cause(self) -> bool:
        return any(map(_cannot_be_collective, self._causes))

    def fail(self, rank: int, error: BaseException, *, peer_lost: bool) -> None:
        """Note that `rank` raised `error`.

        Args:
            peer_lost: the error only reports that another rank went away.
        """
        self._note_failure()
        if peer_lost:
            self.lost_peers[rank] = error
        else:
            self._causes.append(error)

    def _note_failure(self) -> None:
        self._latest_failure_at = time.monotonic()
        self.failed_at = self.failed_at or self._latest_failure_at

    @reraise_keyboard_interrupt()
    def wait(self, poll: Callable[[], None] | None) -> None:
        """Block until all ranks have answered, or the cause of a failure is known or overdue.

        Args:
            poll: called every `POLL_EVERY_S` while no answer comes.
        """
        while self.pending or self.relayed:
            patience_s = self._remaining_patience_s()
            # Since the latest failure: its cause may be the next one to arrive.
            is_over = self._latest_failure_at + (patience_s or 0.0) <= time.monotonic()
            if patience_s is not None and is_over:
                break
            answered_at = self._answered_at
            if answered_at is not None and time.monotonic() > answered_at + _LATE_S:
                self.ask_behind_relays()
            wakes = poll is not None or patience_s is not None or bool(self.relayed)
            ready = self._arrived(POLL_EVERY_S if wakes else None)
            for ref in ready:
                if ref in self.pending:
                    self._take_answer(ref, self.pending.pop(ref))
                elif ref in self.relayed:
                    self._take_relayed(ref)
                else:
                    self._note_end_of_server()
            if poll is not None and not ready:
                poll()
        self._wait_for_server()

    def _arrived(self, timeout_s: float | None) -> list[Any]:
        """What has arrived; waits for the first, for `timeout_s` at most."""
        awaited = [*self.pending, *self.relayed, *self._awaited_servers()]
        ready, left = ray.wait(awaited, num_returns=1, timeout=timeout_s)
        if ready and left:
            # In one go: to wait for each of N answers would be N passes over all of them.
            ready += ray.wait(left, num_returns=len(left), timeout=0)[0]
        if ready and self._answered_at is None:
            self._answered_at = time.monotonic()
        return ready

    def _take_relayed(self, ref: ObjectRef[list[Outcome | None]]) -> None:
        """Take the answers that a relay has brought, and ask for those that it has not."""
        ranks = self.relayed[ref]
        try:
            outcomes = ray.get(ref)
        except RayError:  # whether its worker is lost as well, its own answer tells
            outcomes = []
        for rank, outcome in zip_longest(ranks, outcomes):
            if outcome is None:
                self._ask(rank)
            else:
                self._note_outcome(rank, outcome)
        del self.relayed[ref]

    def ask_behind_relays(self) -> None:
        """Ask all ranks whose relays have not answered: a relay may be stopped, before it has
        brought the call or when it has to bring the answers."""
        for ref, ranks in list(self.relayed.items()):
            for rank in ranks:
                self._ask(rank)
            del self.relayed[ref]

    def _ask(self, rank: int) -> None:
        assert self.ask is not None, "there are relays"
        self.pending[self.ask(rank)] = rank

    def _remaining_patience_s(self) -> float | None:
        """Seconds to wait after the latest failure; None to wait for all answers."""
        together = self.contract.communication is Communication.RUN_GROUP
        if self._outlives_deaths and self.is_recoverable:
            return None
        if self._causes and together:
            may_follow = self._outlives_deaths and not self._has_other_cause
            return _WAIT_FOR_DEATH_S if may_follow else 0.0
        if self.deaths:
            return 0.0
        # A rank that fails closes the method's own group, so that all others answer.
        are_freed = self.contract.communication is Communication.OWN_GROUP
        return None if are_freed or not self.has_failed else _WAIT_FOR_CAUSE_S

    def _take_answer(self, ref: ObjectRef[Outcome], rank: int) -> None:
        try:
            outcome = ray.get(ref)
        except ACTOR_DEATHS as death:
            died = WorkerDiedError(
                f"the process of rank {rank} died during {self.contract.name}",
                where=f"rank {rank}",
                cause=death_reason(death),
                fix=f"look for the reason above (out of memory? killed?), then {LOAD_LAST}",
            )
            died.__cause__ = death
            self._note_failure()
            self.deaths[rank] = died
            return
        self._note_outcome(rank, outcome)

    def _note_outcome(self, rank: int, outcome: Outcome) -> None:
        error = outcome.exception()
        if error is not None:
            self.fail(rank, error, peer_lost=outcome.peer_lost)
            return
        try:
            self.values[rank] = cloudpickle.loads(outcome.value)
        except Exception as failure:  # the code is that of the value's class
            refusal = _not_rebuilt_error(rank, self.contract.name, failure)
            self.fail(rank, refusal, peer_lost=False)

    def _awaited_servers(self) -> list[Any]:
        """The reference of the parameter server's end, if the call needs the server."""
        together = self.contract.communication is Communication.RUN_GROUP
        is_needed = together or self.lost_peers
        return [self._server.serve_ref] if self._server is not None and is_needed else []

    def _wait_for_server(self) -> None:
        """Wait briefly for a server's death that workers may have noticed before the driver."""
        servers = self._awaited_servers()
        if self.lost_peers and not self._causes and not self.deaths and servers:
            ready, _ = ray.wait(servers, timeout=_WAIT_FOR_CAUSE_S)
            if ready:
                self._note_end_of_server()

    def _note_end_of_server(self) -> None:
        died = self._server.death_error() if self._server is not None else None
        self._server = None
        if died is not None:
            self._note_failure()
            self._causes.append(died)

    def cause(self) -> BaseException | None:
        """The failure to raise to the user; None if no rank failed."""
        found = [*self._causes, *self.deaths.values(), *self.lost_peers.values()]
        return next(iter(found), None)


def _not_rebuilt_error(rank: int, name: str, failure: Exception) -> NotPicklableError:
    error = NotPicklableError(
        "what a worker has returned cannot be rebuilt in this process",
        where=f"{name}, rank {rank}",
        got=f"{type(failure).__name__}: {first_line(failure)}",
        cause="its class takes other arguments than pickle gives it (an exception whose __init__"
        " has several), or it is of a module that only the workers have",
        fix="return plain values: numbers, strings, tensors, and lists and dicts of them",
    )
    error.__cause__ = failure
    return error


def _cannot_be_collective(error: BaseException) -> bool:
    """Whether no collective can have raised `error`, so that no lost peer explains it."""
    return isinstance(error, LockstepError) or not isinstance(error, RuntimeError)
