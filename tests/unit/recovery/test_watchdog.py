# SPDX-License-Identifier: Apache-2.0
"""Whom the watchdog ends, from what is seen of them."""

import time
from types import SimpleNamespace

from lockstep.engine.status_polling import PolledStatus
from lockstep.engine.worker_handle import WorkerHandle
from lockstep.phases import Phase
from lockstep.recovery.watchdog import Watchdog
from lockstep.worker import Worker
from lockstep.worker.worker_status import WorkerStatus

LIMIT_S = 0.05


class Seen:
    """StatusPoller that were given."""

    def __init__(self, sightings):
        self.sightings = sightings

    def poll(self, members):
        return {member: self.sightings[member] for member in members}

    def clear(self):
        pass


def test_who_waited_for_one_that_hung_has_time_to_hear_that_the_group_broke():
    """Survivors stand for as long as the one that hung: none of that time is theirs."""
    hung, *survivors = (WorkerHandle(number, "node", number) for number in range(3))
    watchdog = Watchdog(SimpleNamespace(members=[hung, *survivors]), LIMIT_S, shadow_limit=3)
    since = time.monotonic() - 100
    waits = WorkerStatus(3, is_warm=True, phase=Phase.WAITING, line="", stack="")
    computes = WorkerStatus(3, is_warm=True, phase=Phase.FORWARD, line="", stack="")
    sightings = {member: PolledStatus(waits, since) for member in survivors}
    watchdog._poller = Seen(sightings | {hung: PolledStatus(computes, since)})
    pending_call = SimpleNamespace(
        contract=Worker.train.contract,
        local_status=None,
        has_failed=False,
        pending={0: 0, 1: 1, 2: 2},
        values={},
        deaths={},
        lost_peers=set(),
    )
    watchdog.poll(pending_call)
    assert list(watchdog.verdicts) == [hung]

    # Its death is heard; the others have not been freed yet.
    pending_call.has_failed, pending_call.pending = True, {1: 1, 2: 2}
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
