# SPDX-License-Identifier: Apache-2.0
"""A worker that is behind the others, or has made the steps of a call as they have."""

from dataclasses import replace

from tests.ray.operators import DefaultLoop

from lockstep.keys import BATCH_SIZE
from lockstep.worker import WorkerSpec
from lockstep.worker.loop_run import LoopRequest
from lockstep.worker.worker import Worker


def test_it_counts_the_shards_that_it_carried_then():
    """10 rows a batch are 4, 3 and 3; alone it carried all, and afterwards the first only."""
    spec = WorkerSpec(DefaultLoop, {BATCH_SIZE: 10}, num_workers=1, num_shards=3, seed=0)
    worker = Worker(spec, 0, 0)
    worker.start(None)
    call = worker._begin(LoopRequest("train", 4, False, {}))
    setting = worker.operator._lockstep.context
    fewer = replace(setting.shard_assignment, shards=range(1))
    worker.operator._lockstep.context = replace(setting, shard_assignment=fewer)
    call.catch_up(replace(call.progress, steps=2))
    assert call.committed.samples == 20
    worker.stop()


def test_a_call_whose_steps_are_made_asks_no_peer_about_the_data():
    """A peer that has made them as well may have returned from the call, and would not answer."""
    spec = WorkerSpec(DefaultLoop, {BATCH_SIZE: 10}, num_workers=1, num_shards=1, seed=0)
    worker = Worker(spec, 0, 0)
    worker.start(None)
    call = worker._begin(LoopRequest("train", 2, False, {}))
    call.run()
    cursor = worker.cursors["train"]
    assert cursor._agreed_in is not None
    cursor.forget_agreement()  # as in a new group
    behind_its_last_step = replace(call.progress, is_over=False)
    worker._begin(LoopRequest("train", 2, False, {}, interrupted_at=behind_its_last_step)).run()
    assert (cursor._agreed_in is not None, cursor.step) == (False, 2)
    worker._begin(LoopRequest("train", 1, False, {})).run()
    assert (cursor._agreed_in is not None, cursor.step) == (True, 3)
    worker.stop()
