# SPDX-License-Identifier: Apache-2.0
"""A worker as a relay: it brings a call to a group of workers, and answers once for all of them.

Design note. Ray takes 0.2 ms of the driver's time for a message and its answer, so that a call on
1 000 workers took the driver 200 ms. With many workers the driver sends a call to one worker of
each group of ranks (`relay_groups`), in a thread of which `pass_on` runs.

A relay shortens the way of answers, and nothing else depends on it. What it does not bring (of a
worker that died, is late, or has a large answer), and everything if the relay itself dies or does
not answer, the driver asks the workers for (`PendingCall`). That is safe because calls have
numbers: a worker performs no call twice, and none that is older than its latest one
(`WorkerActor.perform`). So the driver hears of deaths and failures from Ray and from the workers,
as it does without relays, and a relay never has to tell a lost worker from a slow one.

Rejected: one process more on each host as a relay, which can hang and die like the others and has
to be watched by itself; and one relay for each host, because the number of messages then depends on
how many workers share a host: it is 1 000 for 1 000 workers with one GPU each.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import RayError

import ray

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from lockstep.worker import Outcome
    from ray import ObjectRef

RANKS_PER_RELAY: Final = 64
"""To reach 1 000 workers the driver sends 16 messages; a relay needs 10 ms to send its own."""

_GATHER_S: Final = 0.1
"""How long a relay waits for other answers after the first one. A failure is the first one, too."""

_LARGEST_ANSWER: Final = 100_000
"""Bytes of an answer that travels through a relay. Its process has no room for many large ones."""

_numbers = count(1)


def next_call_number() -> int:
    """A number for a call, larger than those of all calls before it.

    One sequence for all trainers of the process: an actor may go from one to the next (`prestart`).
    """
    return next(_numbers)


def relay_groups(names: Sequence[str], ranks_per_relay: int = RANKS_PER_RELAY) -> list[range]:
    """The ranks that have a common relay, the first of them; empty if the driver needs no relays.

    Args:
        names: the name of each rank's actor; "" for a rank that only the driver can reach.
    """
    if len(names) < 2 * ranks_per_relay or not all(names):
        return []
    every = range(len(names))
    return [every[first : first + ranks_per_relay] for first in every[::ranks_per_relay]]


def is_small(outcome: Outcome) -> bool:
    """Whether an answer may travel through a relay."""
    return len(outcome.error or outcome.value or b"") <= _LARGEST_ANSWER


def pass_on(
    actors: MutableMapping[str, Any],
    names: Sequence[str],
    send: Callable[[Any], ObjectRef[Outcome | None]],
) -> list[Outcome | None]:
    """Send a call to workers, and gather their answers; runs in the relay.

    Args:
        actors: those that the relay has found before, by name.
        names: of the workers' actors; the first is the relay.
        send: sends the call to one of the actors.

    Returns:
        The outcome of each worker; None of one that has died, or has brought no small answer soon
        after the first one.
    """
    answers: dict[str, ObjectRef[Outcome | None]] = {}
    # The relay itself comes last: its own part of the call would keep the interpreter busy.
    for name in reversed(names):
        with suppress(ValueError):  # it has died
            if name not in actors:
                actors[name] = ray.get_actor(name)
            answers[name] = send(actors[name])
    asked = list(answers.values())
    if asked:
        ray.wait(asked, num_returns=1)
    arrived = set(ray.wait(asked, num_returns=len(asked), timeout=_GATHER_S)[0]) if asked else set()
    return [_outcome(answers[name]) if answers.get(name) in arrived else None for name in names]


def _outcome(answer: ObjectRef[Outcome | None]) -> Outcome | None:
    try:
        return ray.get(answer)
    except RayError:
        return None  # the driver sees by itself how the worker ended
