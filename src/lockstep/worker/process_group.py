# SPDX-License-Identifier: Apache-2.0
"""Forming a process group from a store that the driver holds, and really closing it."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

if TYPE_CHECKING:
    from collections.abc import Iterator

_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one generation meet.

    Attributes:
        host: address of the driver's TCP store.
        generation: counts formations of the group; its keys are prefixed with it, so that
            a late message of an earlier formation is never read.
        one_node: every rank runs on the driver's node, so traffic stays on loopback.
        timeout_s: bound of every collective, in seconds.
    """

    host: str
    port: int
    generation: int
    backend: str
    one_node: bool
    timeout_s: float


def form_group(rendezvous: Rendezvous, rank: int, world_size: int, device: torch.device) -> Any:
    """Meet the other ranks; also torch's default group, unless the process has one already.

    Users' own code in a worker (`SyncBatchNorm`, `dist.get_rank()`) expects a default group.
    A driver that hosts rank 0 may have a default group of its own, which is left alone.

    Collective:
        Blocks until all `world_size` ranks have come, at most `timeout_s`.
    """
    timeout = timedelta(seconds=rendezvous.timeout_s)
    tcp_store = TCPStore(
        rendezvous.host, rendezvous.port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    store = PrefixStore(f"generation-{rendezvous.generation}", tcp_store)
    with _gloo_on_loopback(rendezvous.one_node):
        if dist.is_initialized():
            return dist.ProcessGroupGloo(store, rank, world_size, timeout)
        dist.init_process_group(
            rendezvous.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    return dist.group.WORLD


@contextmanager
def _gloo_on_loopback(one_node: bool) -> Iterator[None]:
    """Gloo would look up the host's name and listen on whatever address it finds.

    The variable is put back: rank 0 may live in the user's own process.
    """
    before = os.environ.get(_GLOO_INTERFACE)
    if not one_node or before is not None or sys.platform != "linux":
        yield
        return
    os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


def leave_group(group: dist.ProcessGroup) -> None:
    """Close the sockets, so that ranks blocked in a collective with this one get an error.

    Measured on gloo: `abort` and `shutdown` unblock nobody; only a closed socket does, and
    the sockets close when the last reference to the group is gone. NCCL needs the abort.
    """
    if not dist.is_initialized() or group is not dist.group.WORLD:
        return
    if dist.get_backend() == "nccl":
        group._get_backend(torch.device("cuda")).abort()
    dist.destroy_process_group()
