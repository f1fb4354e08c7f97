# SPDX-License-Identifier: Apache-2.0
"""Runs ranks as threads of one process, for tests. This module needs torch, and no Ray."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from lockstep.errors import PeerLostError
from lockstep.group import Group

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_TIMEOUT = timedelta(seconds=60)


def run_ranks(world_size: int, body: Callable[[Group], Result]) -> list[Result]:
    """Run `body(group)` on `world_size` ranks; results by rank.

    The ranks are threads of this process with a real gloo group between them: a hundredth
    of a second instead of the seconds that processes take. They share the global random
    generators, so `body` should draw nothing from them.

    Raises:
        The error of the first failing rank, of any type. Closing that rank's group ends the
            collectives in which the other ranks wait; their `PeerLostError` only if there is no
            other.
    """
    store = dist.HashStore()
    barrier = threading.Barrier(world_size)

    def run(rank: int) -> Result:
        barrier.wait()
        group = Group(dist.ProcessGroupGloo(store, rank, world_size, _TIMEOUT))
        try:
            return body(group)
        finally:
            group.close()

    with ThreadPoolExecutor(world_size) as ranks:
        runs = [ranks.submit(run, rank) for rank in range(world_size)]
    failures = [error for run in runs if (error := run.exception()) is not None]
    # A rank that lost its peer says less than the peer.
    for failure in sorted(failures, key=lambda one: isinstance(one, PeerLostError)):
        raise failure
    return [run.result() for run in runs]
