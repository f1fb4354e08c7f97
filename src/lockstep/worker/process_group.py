# SPDX-License-Identifier: Apache-2.0
"""Forms process groups over the driver's store, and closes them so that waiting ranks are freed."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

from lockstep._torch_compat import set_backend_timeout
from lockstep.error_texts import first_line
from lockstep.errors import PeerLostError, WrongUseError
from lockstep.phases import Phase, in_phase
from lockstep.process_group_backend import abort_nccl
from lockstep.worker.network_interface import interface_towards

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.sync import ServerAddress

_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of one generation find each other.

    Attributes:
        host: address of the driver's TCP store.
        generation: the number of the generation. Keys in the store are prefixed with it, so that a
            late message of an earlier generation is never read.
        one_node: every rank runs on the driver's node, so traffic stays on loopback.
        timeout_s: timeout of every collective, in seconds.
        as_default: the group becomes torch's default group. The same on every rank: torch uses
            other keys for a default group, and ranks with different values would wait for ever.
        server_address: the address of the parameter server, if there is one.
    """

    host: str
    port: int
    generation: int
    backend: str
    one_node: bool
    timeout_s: float
    as_default: bool = True
    server_address: ServerAddress | None = None


@in_phase(Phase.FORMING_GROUP)
def form_group(rendezvous: Rendezvous, rank: int, world_size: int, device: torch.device) -> Any:
    """Form the group of all ranks, as torch's default group if `rendezvous.as_default`.

    Users' own code in a worker (`SyncBatchNorm`, `dist.get_rank()`) expects a default group. A
    driver that hosts rank 0 may have a default group of its own, which stays.

    Collective:
        Blocks until all `world_size` ranks have arrived, at most `timeout_s`.

    Raises:
        PeerLostError: a rank did not arrive.
        WrongUseError: this process has a default group that the driver does not know of.
    """
    if rendezvous.as_default and dist.is_initialized():
        raise WrongUseError(
            "this worker's process has a default process group already",
            where=f"rank {rank}",
            cause="the initialization_hook, or a module that was imported, called"
            " torch.distributed.init_process_group",
            fix="leave it out: the workers' group becomes the default group by itself",
        )
    with _choose_gloo_interface(rendezvous), _preserve_excepthook():
        try:
            return _connect(rendezvous, rank, world_size, device)
        except RuntimeError as error:
            raise _rendezvous_error(error, rank, world_size) from error


def form_group_of_one(device: torch.device) -> Any:
    """A default group of this process alone, in which a spare cuts its model into shards."""
    backend = _backends("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def _rendezvous_error(error: RuntimeError, rank: int, world_size: int) -> PeerLostError:
    return PeerLostError(
        "the ranks did not meet",
        where=f"rank {rank} of {world_size}",
        got=first_line(error),
        cause="another rank failed or died before it came, or came too late",
        fix="look for the first failure among the other ranks",
    )


def _connect(rendezvous: Rendezvous, rank: int, world_size: int, device: torch.device) -> Any:
    tcp_store = _connect_to_store(rendezvous)
    tcp_store.set(arrival_key(rank), "here")
    store = PrefixStore(f"generation-{rendezvous.generation}", tcp_store)
    if rendezvous.as_default:
        dist.init_process_group(
            _backends(rendezvous.backend),
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=rendezvous.timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        return dist.group.WORLD
    return _raw_group(rendezvous, store, rank, world_size)


def _backends(backend: str) -> str:
    """What torch's group of the ranks consists of: beside NCCL gloo, for tensors on the CPU.

    So metadata travels on the CPU with either: no host waits for its device, and a rank that does
    not come is named.
    """
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def _connect_to_store(rendezvous: Rendezvous) -> TCPStore:
    timeout = timedelta(seconds=rendezvous.timeout_s)
    return TCPStore(
        rendezvous.host, rendezvous.port, is_master=False, timeout=timeout, wait_for_workers=False
    )


def _raw_group(rendezvous: Rendezvous, store: Any, rank: int, world_size: int) -> Any:
    timeout = timedelta(seconds=rendezvous.timeout_s)
    if rendezvous.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        set_backend_timeout(options, timeout)
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)


def form_second_group(
    rendezvous: Rendezvous, name: str, rank: int, world_size: int, *, alone: bool
) -> Any:
    """A further group of the same ranks, or of this rank alone, to be left by `leave_group`.

    Args:
        name: the same on every rank, and another one for each group.
        alone: form a group of this rank only. The result is None where the run's group is not
            torch's default group, for then no code needs a substitute for the default group.

    Collective:
        Unless `alone`, blocks until all ranks of the run's group have arrived.

    Raises:
        PeerLostError: a rank did not arrive.
    """
    timeout = timedelta(seconds=rendezvous.timeout_s)
    with _choose_gloo_interface(rendezvous):
        try:
            if rendezvous.as_default:
                return dist.new_group(
                    [rank] if alone else None,
                    timeout=timeout,
                    backend=_backends(rendezvous.backend),
                    use_local_synchronization=alone,
                )
            if alone:
                return None
            prefix = f"generation-{rendezvous.generation}-{name}"
            store = PrefixStore(prefix, _connect_to_store(rendezvous))
            return _raw_group(rendezvous, store, rank, world_size)
        except RuntimeError as error:
            raise _rendezvous_error(error, rank, world_size) from error


class HasGroup(Protocol):
    """A worker, asked for its group each time: holding the group itself would keep it open."""

    @property
    def process_group(self) -> Any: ...


@contextmanager
def use_as_default_group(member: HasGroup) -> Iterator[None]:
    """Inside, torch's default group is `member`'s group, if that is a `dist.ProcessGroup`.

    Users' code that uses the default group (`SyncBatchNorm`, `dist.all_reduce`) then communicates
    with the ranks of that group.
    """
    is_kept = isinstance(member.process_group, dist.ProcessGroup)
    # In a list that is emptied again: a traceback keeps this frame, and its variables, alive.
    before = [dist.group.WORLD] if is_kept else []
    if is_kept:
        dist.group.WORLD = member.process_group
    try:
        yield
    finally:
        if before:
            dist.group.WORLD = before.pop()


def arrival_key(rank: int) -> str:
    """The key that a rank sets in the driver's store before it waits for the other ranks."""
    return f"arrived-{rank}"


@contextmanager
def _preserve_excepthook() -> Iterator[None]:
    """Restore `sys.excepthook`: torch's hook would write a rank before every traceback."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


@contextmanager
def _choose_gloo_interface(rendezvous: Rendezvous) -> Iterator[None]:
    """Let gloo listen where the other ranks reach it, and on one machine nowhere else.

    By default gloo looks up the machine's own name and listens on the address that it finds: one
    that strangers reach, or on many systems one (127.0.1.1) that no other machine reaches. The
    variable is
    restored: rank 0 may live in the user's own process.
    """
    before = os.environ.get(_GLOO_INTERFACE)
    name = None
    if before is None and sys.platform == "linux":
        name = "lo" if rendezvous.one_node else interface_towards(rendezvous.host, rendezvous.port)
    if name is None:
        yield
        return
    os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


def leave_group(held: list[Any]) -> threading.Thread:
    """Close the sockets, so that ranks blocked in a collective with this one get an error.

    Measured on gloo: `abort` and `shutdown` unblock no rank; only a closed socket does, and the
    sockets close when the last reference to the group is dropped. The drop waits for gloo's thread,
    which wakes every 10 ms; so it happens in a thread of its own.

    Args:
        held: a list with the only reference to the group; emptied.

    Returns:
        The thread at whose end the sockets are closed.
    """
    _drop_torch_references(held[0])
    closing = threading.Thread(target=held.clear, name="lockstep-closes-group")
    closing.start()
    return closing


def _drop_torch_references(group: Any) -> None:
    """Drop torch's references to `group`. Ranks that wait on NCCL are freed by the abort."""
    abort_nccl(group)
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)
