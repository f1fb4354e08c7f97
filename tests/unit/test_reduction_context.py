# SPDX-License-Identifier: Apache-2.0
"""Which reduction is active, where ranks are threads of one process."""

import sys
import threading

from lockstep.reduction_context import ReductionContext, activate, active

_TURNS = 3000


def test_ranks_that_are_threads_enter_and_leave_at_the_same_time():
    failures = []
    begin = threading.Barrier(8)

    def one_rank():
        mine = ReductionContext(group=None)
        begin.wait()
        try:
            for _ in range(_TURNS):
                with activate(mine):
                    assert active() is mine
        except BaseException as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=one_rank) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert failures == []
    assert active() is None
