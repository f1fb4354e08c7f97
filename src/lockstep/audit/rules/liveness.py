# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom, when a run stands still or a collective fails."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from lockstep.audit.rules.base import Code, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.audit.facts import Collective
    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Ledger
    from lockstep.audit.world import World

WAITING = Code("LS601", "ranks wait for a rank that does not come")
DIED = Code("LS602", "a rank ended without a word")

_BACKENDS: Final = ("gloo", "NCCL")
_PEER_LOST: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
)
"""What they say of it, with their own name beside it: other connections break as well."""


def _look(world: World) -> Iterable[Finding]:
    """Compares where each rank stood when the run failed or was interrupted."""
    lost = world.lost
    stuck = {r: led.stuck_in for r, led in world.ledgers.items() if led.stuck_in is not None}
    if stuck and world.size > 1:
        yield _waiting(world, stuck, lost)
    elif (left := _left_the_others(world)) is not None:
        yield left
    died = {r: led.facts.died for r, led in world.ledgers.items() if led.facts.died}
    where = [place for led in world.ledgers.values() for place in led.stack]
    if died:
        killed = ", ".join(f"rank {rank} by {name}" for rank, name in died.items())
        what = f"killed before it could write down what it saw: {killed}"
        fix = "look for its last output; SIGKILL is often a lack of memory"
        yield DIED.finding(what, fix, rank=sorted(died), where=where)
    elif lost and len(lost) < world.size and not stuck:
        what = f"ranks {lost} left no record: they were killed, or ended without leaving Python"
        fix = "look for their last output; a killed process is often out of memory"
        yield DIED.finding(what, fix, rank=lost, where=where)


LIVENESS = Rule((WAITING, DIED), _look)


def _left_the_others(world: World) -> Finding | None:
    """A rank came to the end of its program, and another one's connection to it broke.

    Inside backward no function of Python's waits: what the reducer's collective raised tells.
    """
    broken = {r: led for r, led in world.ledgers.items() if _lost_a_peer(led)}
    ended = {
        r: led for r, led in world.ledgers.items() if led.failure is None and led.exit_code == 0
    }
    steps = {r: max((t.count for t in led.tracks), default=0) for r, led in world.ledgers.items()}
    # An exception of a rank's own breaks the others' connections as well, and whoever took part in
    # the step that broke did not leave before it.
    left = broken and ended and min(steps[r] for r in ended) <= max(steps[r] for r in broken)
    if not left or any(_failed_by_itself(each, broken) for each in world.ledgers.values()):
        return None
    done = "; ".join(f"rank {r} ended in order after step {steps[r]}" for r in ended)
    waited = "; ".join(
        f"rank {r} {led.standing} in its step {steps[r] + 1}" for r, led in broken.items()
    )
    return WAITING.finding(
        f"rank {', '.join(map(str, ended))} is missing: {done}; {waited}",
        "leave the loop on all ranks at the same step: decide by what all ranks share (a metric "
        "that was averaged over them, a broadcast from rank 0), and give all as many batches",
        rank=sorted(ended),
        evidence={"steps": steps},
        where=[place for led in broken.values() for place in led.stack],
    )


def _failed_by_itself(ledger: Ledger, broken: dict[int, Ledger]) -> bool:
    """Before the connections broke: what came of that a program may say in words of its own."""
    if ledger.failure is None or any(name in ledger.failure.message for name in _BACKENDS):
        return False
    return (ledger.failed_at or 0.0) <= min(each.failed_at or 0.0 for each in broken.values())


def _lost_a_peer(ledger: Ledger) -> bool:
    message = "" if ledger.failure is None else ledger.failure.message
    return any(name in message for name in _BACKENDS) and any(
        words in message for words in _PEER_LOST
    )


def _waiting(world: World, stuck: dict[int, Collective], lost: list[int]) -> Finding:
    calls = {r: led.calls_made for r, led in world.ledgers.items()}
    most = max(calls.values())
    operations = {call.op for rank, call in stuck.items() if calls[rank] == most}
    elsewhere = [*lost, *(rank for rank in world.ledgers if rank not in stuck)]
    stood = [stuck[r].where if r in stuck else led.stack for r, led in world.ledgers.items()]
    lines = [f"rank {rank} {ledger.standing}" for rank, ledger in world.ledgers.items()]
    lines += [f"rank {rank} left no record" for rank in lost]
    mixed = not elsewhere and (len(operations) > 1 or len(set(calls.values())) > 1)
    missing = elsewhere or sorted(r for r, count in calls.items() if count < most) or list(stuck)
    what = (
        "the ranks are in different collectives"
        if mixed
        else f"rank {', '.join(map(str, missing))} is missing"
    )
    return WAITING.finding(
        f"{what}: " + "; ".join(lines),
        "every rank has to make the same collective calls in the same order: look for a condition "
        "on the rank or on this rank's own data before the lines above",
        rank=missing,
        evidence={"calls": calls, "waiting": list(stuck)},
        where=list(itertools.chain(*stood)),
    )
