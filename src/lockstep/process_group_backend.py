# SPDX-License-Identifier: Apache-2.0
"""Properties of an existing process group that depend on its backend, gloo or NCCL.

The device for metadata, the timeout of a collective, how many were started, the abort of those that
run, messages between two ranks, and what is called before a collective.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakMethod

import torch

from lockstep._torch_compat import backend_of, backend_timeout_s, devices_of, start_counter

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from lockstep.hierarchical_sum import HierarchicalAllReduce

_MONITORED_TAG: Final = 0x10C5

_watchers: Final[WeakKeyDictionary[Any, WeakMethod[Callable[[], None]]]] = WeakKeyDictionary()


def metadata_device(process_group: Any | None) -> torch.device:
    """The device for small tensors of metadata: the CPU, if the backend sends CPU tensors."""
    if process_group is None or not torch.cuda.is_available():
        return torch.device("cpu")
    # A raw backend has no list of devices; NCCL is the only one that sends no CPU tensors.
    devices = devices_of(process_group)
    if devices is not None:
        carries_cpu = torch.device("cpu") in devices
    else:
        carries_cpu = "nccl" not in str(process_group.name()).lower()
    return torch.device("cpu") if carries_cpu else torch.device("cuda", torch.cuda.current_device())


def has_backend_for(process_group: Any, device: torch.device) -> bool:
    """Whether `process_group` sends tensors on `device`; True where it does not say for which."""
    devices = devices_of(process_group)
    return not devices or device.type in {one.type for one in devices}


def timeout_s(process_group: Any) -> float:
    """The timeout of a collective, in seconds; infinite if the backend has no options."""
    return backend_timeout_s(backend_of(process_group, "cpu"))


class StartedCollectives:
    """How many collectives this rank has started over a process group, whoever starts them.

    A program that calls ``torch.distributed`` with the process group counts as well.

    Args:
        process_group: None for a rank alone.
        metadata_device: where metadata travels.

    Attributes:
        over_hosts: sends messages that stand for all-reduces; None where there is none.
    """

    def __init__(self, process_group: Any | None, metadata_device: torch.device) -> None:
        self._process_group = process_group
        self._metadata_device = metadata_device
        self._counters: dict[torch.device, Callable[[], int] | None] = {}
        self.over_hosts: HierarchicalAllReduce | None = None

    def on(self, device: torch.device) -> int | None:
        """The number over the backend for tensors on `device`.

        None if the backend does not count, or there is none for the device.
        """
        if device not in self._counters:
            if self._process_group is None:
                return 0
            self._counters[device] = _start_counter_of(self._process_group, device)
        counter = self._counters[device]
        if counter is None or self.over_hosts is None or device.type != "cpu":
            return None if counter is None else counter()
        return self.over_hosts.count_collectives(counter)

    def on_any_of(self, devices: Set[torch.device]) -> int:
        """The number for tensors on `devices` and for metadata, over the backends that count."""
        return sum(self.on(device) or 0 for device in {self._metadata_device, *devices})

    def freeze(self) -> None:
        """Let go of the process group. The numbers stay, for a rank that undoes a step."""
        numbers = {device: self.on(device) for device in list(self._counters)}
        self._counters = {
            device: None if number is None else partial(int, number)
            for device, number in numbers.items()
        }
        self.over_hosts = self._process_group = None


def _start_counter_of(process_group: Any, device: torch.device) -> Callable[[], int] | None:
    """Reads how many collectives the backend for tensors on `device` has started.

    It keeps the backend alive. None if the backend counts none, or there is none for the device.
    """
    try:
        return start_counter(backend_of(process_group, device.type))
    except RuntimeError:
        return None  # no backend for this device


def abort_nccl(group: Any) -> None:
    """Abort the collectives of NCCL that run on `group`, if it has that; from any thread.

    For gloo see `GlooSockets`.
    """
    devices = devices_of(group)
    if devices is None or torch.device("cuda") in devices:
        backend = backend_of(group, "cuda")
        if "nccl" in type(backend).__name__.lower():
            backend.abort()


def receive_from_all(
    process_group: Any, mine: torch.Tensor, received: torch.Tensor, limit_s: float
) -> RuntimeError | None:
    """Send `mine` to every other rank, and receive theirs; the first failure, or None.

    Args:
        mine: on the CPU.
        received: one row for each rank; those that did not arrive stay as they are.
        limit_s: how long to wait for each message.
    """
    limit = timedelta(seconds=min(limit_s, timeout_s(process_group)))
    works: list[Any] = []
    others = [rank for rank in range(process_group.size()) if rank != process_group.rank()]
    try:
        receive, send = (getattr(process_group, name) for name in ("recv", "send"))
        works += [receive([received[rank]], rank, _MONITORED_TAG) for rank in others]
        works += [send([mine], rank, _MONITORED_TAG) for rank in others]
        for work in works:
            work.wait(limit)
    except RuntimeError as error:
        works.clear()
        return error.with_traceback(None)
    return None


def watch(process_group: Any, watcher: Callable[[], None]) -> None:
    """Call `watcher` before each collective over `process_group` of any `Group`.

    Args:
        process_group: neither it nor the watcher is kept alive.
        watcher: a bound method.
    """
    _watchers[process_group] = WeakMethod(watcher)


def call_watcher(process_group: Any) -> None:
    """Say that a collective over `process_group` is about to begin."""
    reference = _watchers.get(process_group)
    if reference is not None and (watcher := reference()) is not None:
        watcher()
