# SPDX-License-Identifier: Apache-2.0
"""How long the driver waits for the cause of a failure, with real processes that answer or die."""

import os
import time

import pytest

import ray
from lockstep.engine.pending_call import PendingCall
from lockstep.errors import PeerLostError, WorkerDiedError
from lockstep.worker import Worker, failed_outcome


@ray.remote(num_cpus=0)
class Rank:
    def is_ready(self):
        return True

    def loses_its_peer(self):
        return failed_outcome(0, PeerLostError("another rank went away"))

    def dies(self, after_s):
        time.sleep(after_s)
        os._exit(1)

    def never_answers(self):
        time.sleep(60)


@pytest.mark.slow
def test_a_death_that_follows_its_consequence_ends_the_wait():
    """Not two seconds after the consequence, as if nothing had come since."""
    ranks = [Rank.remote() for _ in range(3)]
    ray.get([rank.is_ready.remote() for rank in ranks])
    pending_call = PendingCall(Worker.call.contract, outlives_deaths=False)
    pending_call.pending = {
        ranks[0].loses_its_peer.remote(): 0,
        ranks[1].dies.remote(0.1): 1,
        ranks[2].never_answers.remote(): 2,
    }
    began = time.monotonic()
    pending_call.wait(None)
    seconds = time.monotonic() - began
    for rank in ranks:
        ray.kill(rank)
    assert isinstance(pending_call.cause(), WorkerDiedError)
    assert seconds < 1.9
