# SPDX-License-Identifier: Apache-2.0
"""Buckets leave in one order, whichever thread of autograd's completes them."""

import threading

import torch
from torch import nn

from lockstep.group import Group
from lockstep.pending_collective import Pending
from lockstep.sync.buckets import Slot
from lockstep.sync.reducer import Reducer


def test_buckets_that_two_threads_complete_leave_one_after_the_other():
    """Of a rank with two devices: its peers start the same collectives in the same order."""
    params = [nn.Parameter(torch.zeros(8)) for _ in range(3)]
    slots = [Slot(number, str(number), param, None) for number, param in enumerate(params)]
    left: list[int] = []
    other = threading.Thread(target=lambda: reducer.arrive(slots[1]))

    def combine(_: Group, bucket: object) -> Pending:
        if bucket is reducer.layout.buckets[0]:
            other.start()
            other.join(timeout=0.5)  # as long as a wrong one needs to overtake
        left.append(reducer.layout.buckets.index(bucket))
        return Pending()

    reducer = Reducer(slots, Group(None), cap_bytes=32, combine=combine)
    for param in params:
        param.grad = torch.ones_like(param)
    reducer.start(reducer.contribution)
    reducer.arrive(slots[2])
    other.join()
    assert left == [0, 1]
