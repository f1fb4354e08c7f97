# SPDX-License-Identifier: Apache-2.0
"""A worker's group is broken from another thread."""

import threading
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import side_by_side
from tests.ray.operators import DefaultLoop

from lockstep.errors import PeerLostError
from lockstep.keys import BATCH_SIZE
from lockstep.worker import Rendezvous, Worker
from lockstep.worker.spec import WorkerSpec

CPU = torch.device("cpu")


@pytest.fixture
def meet_in():
    """A function that lets two workers, which are threads, meet in a generation; by rank."""
    spec = WorkerSpec(DefaultLoop, {BATCH_SIZE: 10}, num_workers=2, num_shards=2, seed=0)
    workers = [Worker(spec, rank, rank) for rank in range(2)]
    both, stores = threading.Barrier(2), []

    def meet(generation):
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        stores.append(store)
        place = Rendezvous(
            "127.0.0.1", store.port, generation, "gloo", True, 20.0, as_default=False
        )
        groups = [None, None]

        def one(rank):
            workers[rank].leave()
            both.wait(20)
            groups[rank] = workers[rank].meet(place, CPU)

        side_by_side(one, 2)
        return workers, groups

    with ExitStack() as ends:
        for worker in workers:
            ends.callback(worker.stop)
        yield meet


def exchanged(groups):
    """What an exchange brings on each rank: the values, or why not."""
    found = [None, None]

    def one(rank):
        try:
            found[rank] = groups[rank].exchange(rank)
        except PeerLostError as error:
            found[rank] = error

    side_by_side(one, 2)
    return found


def test_a_call_that_comes_late_breaks_no_later_group(meet_in):
    """It was sent because a peer was lost; by now the others have formed the next group."""
    meet_in(0)
    workers, groups = meet_in(1)
    workers[0].break_group(0)
    assert exchanged(groups) == [[0, 1], [0, 1]]
    workers[0].break_group(1)
    assert all(isinstance(one, PeerLostError) for one in exchanged(groups))
