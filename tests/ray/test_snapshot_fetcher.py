# SPDX-License-Identifier: Apache-2.0
"""A copy of the state that is on its way to the driver is not lost where the driver stops waiting.

`lockstep.engine.snapshot_fetcher`.
"""

import os
import signal
import threading
from types import SimpleNamespace

import pytest

import ray
from lockstep.engine.snapshot_fetcher import RemoteSnapshotFetcher
from lockstep.serialization import split


@ray.remote(num_cpus=0, max_concurrency=2)
class Rank0:
    """Gives the copy of step 5 once, when the test lets it; presses Ctrl-C in the driver before."""

    def __init__(self, driver=None):
        self.driver, self.left, self.may_answer = driver, [5], threading.Event()

    def snapshot(self, is_requested):
        if self.driver is not None:
            os.kill(self.driver, signal.SIGINT)
        self.may_answer.wait()
        structure, _ = split({"weight": 1})
        return (self.left.pop(), 0, structure, []) if self.left else None

    def let_answer(self):
        self.driver = None
        self.may_answer.set()


def fetcher_of(actor):
    received = []
    keeper = SimpleNamespace(keep=lambda snapshot: received.append(snapshot.step))
    rank_0 = SimpleNamespace(actor=actor, worker=None)
    return RemoteSnapshotFetcher(lambda: rank_0, keeper, lambda: None), received


@pytest.mark.parametrize("how", ["limit", "Ctrl-C"])
def test_one_that_was_not_waited_for_comes_with_the_next_question(how):
    actor = Rank0.remote(os.getpid() if how == "Ctrl-C" else None)
    fetcher, received = fetcher_of(actor)
    if how == "limit":
        fetcher.finish(0.1)
    else:
        with pytest.raises(KeyboardInterrupt):
            fetcher.finish()
    assert received == []
    ray.get(actor.let_answer.remote())
    fetcher.finish()
    assert received == [5]


def test_one_of_steps_that_the_run_has_left_is_dropped():
    actor = Rank0.remote()
    fetcher, received = fetcher_of(actor)
    fetcher.poll()
    fetcher.drop()
    ray.get(actor.let_answer.remote())
    fetcher.finish()
    assert received == []
