# SPDX-License-Identifier: Apache-2.0
"""Whom the watchdog ends, from what is seen of them."""

import math
import time
from types import SimpleNamespace

import pytest

from lockstep.engine.status_polling import PolledStatus
from lockstep.engine.worker_handle import WorkerHandle
from lockstep.phases import Phase
from lockstep.recovery import watchdog as watchdog_module
from lockstep.recovery.polling_clock import PollingClock
from lockstep.recovery.watchdog import Watchdog
from lockstep.worker import Worker
from lockstep.worker.worker_status import WorkerStatus

LIMIT_S = 0.05


class Seen:
    """StatusPoller that were given."""

    def __init__(self, sightings):
        self.sightings = sightings

    def poll(self, members, now):
        return {member: self.sightings[member] for member in members}

    def clear(self):
        pass


def performing(ranks):
    return SimpleNamespace(
        contract=Worker.train.contract,
        local_status=None,
        has_failed=False,
        performing=list(range(ranks)),
        ask_behind_relays=lambda: None,
        values={},
        deaths={},
        lost_peers=set(),
    )


def test_who_waited_for_one_that_hung_has_time_to_hear_that_the_group_broke():
    """Survivors stand for as long as the one that hung: none of that time is theirs."""
    hung, *survivors = (WorkerHandle(number, "node", number) for number in range(3))
    watchdog = Watchdog(SimpleNamespace(members=[hung, *survivors]), LIMIT_S, shadow_limit=3)
    since = -100.0  # before the watchdog's clock began
    waits = WorkerStatus(3, is_warm=True, phase=Phase.WAITING, line="", stack="")
    computes = WorkerStatus(3, is_warm=True, phase=Phase.FORWARD, line="", stack="")
    sightings = {member: PolledStatus(waits, since) for member in survivors}
    watchdog._poller = Seen(sightings | {hung: PolledStatus(computes, since)})
    pending_call = performing(3)
    watchdog.poll(pending_call)
    assert list(watchdog.verdicts) == [hung]

    # Its death is heard; the others have not been freed yet.
    pending_call.has_failed, pending_call.performing = True, [1, 2]
    broke = time.monotonic()
    watchdog.poll(pending_call)
    assert list(watchdog.verdicts) == [hung]
    while len(watchdog.verdicts) < 3:
        watchdog.poll(pending_call)
    assert time.monotonic() - broke > LIMIT_S

    # The next call knows nothing of it.
    watchdog.begin_call()
    watchdog.verdicts.clear()
    watchdog.poll(pending_call)
    assert watchdog.verdicts == {}


def test_ranks_behind_relays_are_asked_long_before_one_is_at_fault():
    """A rank to which a stopped relay has not brought the call makes no step, and does not wait."""
    now, asked = [1000.0], []
    idle, waiting = (WorkerHandle(number, "node", number) for number in range(2))
    watchdog = Watchdog(SimpleNamespace(members=[idle, waiting]), 60.0, shadow_limit=3)
    watchdog._clock = PollingClock(read=lambda: now[0])
    waits = WorkerStatus(3, is_warm=True, phase=Phase.WAITING, line="", stack="")
    does_nothing = WorkerStatus(3, is_warm=True, phase=Phase.FORWARD, line="", stack="")
    watchdog._poller = Seen({idle: PolledStatus(does_nothing, 0), waiting: PolledStatus(waits, 0)})
    call = performing(2)
    call.ask_behind_relays = lambda: asked.append(now[0])
    for _ in range(120):
        watchdog.poll(call)
        now[0] += 0.25
    assert asked == []
    for _ in range(2):
        watchdog.poll(call)
        now[0] += 0.25
    assert asked
    assert watchdog.verdicts == {}


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_driver_that_did_not_look_holds_that_time_against_no_worker(is_silent):
    """In a callback that takes minutes, at a breakpoint, stopped by Ctrl-Z: what the driver knows
    of the workers is as old, and a request of before may wait in its socket with its answer."""
    now = [1000.0]
    slow, waiting = (WorkerHandle(number, "node", number) for number in range(2))
    watchdog = Watchdog(SimpleNamespace(members=[slow, waiting]), 60.0, shadow_limit=3)
    watchdog._clock = PollingClock(read=lambda: now[0])
    watchdog._reachable_nodes["node"] = math.inf, True
    waits = WorkerStatus(3, is_warm=True, phase=Phase.WAITING, line="", stack="")
    computes = WorkerStatus(3, is_warm=True, phase=Phase.FORWARD, line="", stack="")
    sightings = {}

    class FirstSeen(Seen):
        def poll(self, members, now):
            for member in members:
                status = waits if member is waiting else computes
                asked_at = now if is_silent and member is slow else None
                self.sightings.setdefault(member, PolledStatus(status, now, asked_at))
            return super().poll(members, now)

    watchdog._poller = FirstSeen(sightings)
    watchdog.poll(performing(2))
    now[0] += 10_000  # the driver is stopped
    watchdog.poll(performing(2))
    assert watchdog.verdicts == {}
    for _ in range(200):  # it polls again: now it sees for itself
        now[0] += 0.25
        watchdog.poll(performing(2))
    assert watchdog.verdicts == {}
    for _ in range(50):
        now[0] += 0.25
        watchdog.poll(performing(2))
    assert list(watchdog.verdicts) == [slow]


@pytest.mark.parametrize("state", ["T", "S"])
def test_outside_of_a_call_a_worker_is_ended_if_it_is_stopped(monkeypatch, state):
    """Nobody waits for it in a collective, but the driver for what it writes."""
    now = [1000.0]
    worker = WorkerHandle(0, "node", 0)
    monkeypatch.setattr(watchdog_module, "process_state", lambda _: state)
    watchdog = Watchdog(SimpleNamespace(members=[worker]), 60.0, shadow_limit=3)
    watchdog._clock = PollingClock(read=lambda: now[0])
    waits = WorkerStatus(3, is_warm=True, phase=Phase.WAITING, line="", stack="")
    watchdog._poller = Seen({worker: PolledStatus(waits, 0.0)})
    for _ in range(200):
        watchdog.end_stopped_workers()
        now[0] += 0.25
    assert watchdog.verdicts == {}
    for _ in range(100):
        watchdog.end_stopped_workers()
        now[0] += 0.25
    assert list(watchdog.verdicts) == ([worker] if state == "T" else [])


def test_ranks_that_wait_for_one_that_left_are_not_said_to_have_waited_while_nobody_looked():
    now = [1000.0]
    left, waiting = (WorkerHandle(number, "node", number) for number in range(2))
    broken = []
    workers = SimpleNamespace(members=[left, waiting], break_group=broken.append)
    watchdog = Watchdog(workers, 60.0, shadow_limit=3)
    watchdog._clock = PollingClock(read=lambda: now[0])
    stack = '  File "/site-packages/lockstep/pending_collective.py", line 55, in wait\n'
    waits = WorkerStatus(3, is_warm=True, phase=Phase.WAITING, line="", stack=stack)
    watchdog._poller = Seen({waiting: PolledStatus(waits, 0.0)})
    call, failures = performing(2), []
    call.performing, call.values = [1], {0: SimpleNamespace(steps=3)}
    call.fail = lambda rank, error, peer_lost: failures.append(error)
    watchdog.poll(call)
    now[0] += 10_000
    watchdog.poll(call)
    assert failures == []
    for _ in range(250):
        now[0] += 0.25
        watchdog.poll(call)
    assert failures
