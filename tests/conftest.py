# SPDX-License-Identifier: Apache-2.0
"""The leak police: a test leaves the process as it found it.

A changed default dtype, a forgotten process group or a surviving thread makes *another* test
fail, at another time, for a reason that nobody finds. Here the test that did it fails.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sampling import mark_the_rest_slow
from torch.optim.optimizer import _global_optimizer_pre_hooks
from xdist.scheduler import LoadScopeScheduling

THREADS_END_WITHIN_S = 10.0
"""A thread that was told to stop may need a moment; one that was not stays for ever."""

# The others are set by torch when its compiler is first imported (by an optimizer, say), and by
# Ray and tensorboardX (which Ray Tune imports) when they are.
_SET_BY_THE_RUNNER = frozenset(
    {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "RAY_CLIENT_MODE", "CRC32C_SW_MODE"}
)


# Ray's workers would give way to whatever else runs, as another test's ranks do, and starve.
os.environ.update({"RAY_worker_niceness": "0"})

# A plain `ray.init()` leaves a token in the home directory where none is given. From then on every
# other Ray of this account asks for it. The clusters of a test run have one that ends with them.
if not any(name.startswith("RAY_AUTH") for name in os.environ):
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

# A shell's background job ignores Ctrl-C, and so would each program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_TOGETHER = {
    "tests/ray": "ray",
    "tests/procs": "processes",
    "tests/faults": "processes",
    "tests/audit": "audit",
}
"""Folders whose tests share what is dear to start, so that one process runs them all. (Three
processes with a Ray each were slower on two cores, and starved tests that wait for processes.)"""


class _FoldersTogether(LoadScopeScheduling):
    """Tests go to whoever is free, but for those folders. (Of xdist's own ways, "loadgroup"
    does not see its marks under pytest 9.2, and "loadfile" would start Ray in every process.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return _TOGETHER.get("/".join(nodeid.split("/")[:2]), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _FoldersTogether(config, log)


SLOW_TEST_S = 240
"""A slow test may have to start processes while its neighbour keeps both cores busy."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest_slow(items)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_S))


@contextmanager
def _locked(file: Path, how: int) -> Iterator[None]:
    with file.open("a") as opened:
        fcntl.flock(opened, how)
        try:
            yield
        finally:
            # Closing alone would leave the lock with a process that the test has forked.
            fcntl.flock(opened, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is marked `alone` runs while xdist's other processes run none.

    Bounds on seconds mean nothing on a machine that a neighbour keeps busy. The turn is taken
    around the protocol, and not in a fixture, because pytest-timeout counts fixtures.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)  # no other process runs tests of this run
    # xdist gives each process a folder in the one of the run, which pytest clears away.
    shared = Path(item.config.option.basetemp).parent
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with ExitStack() as turn:
        # A test that waits at the lock keeps the gate, so that no other test overtakes it.
        with _locked(shared / "gate", fcntl.LOCK_EX):
            turn.enter_context(_locked(shared / "lock", how))
        return (yield)


@dataclass(frozen=True)
class ProcessState:
    """What a test may change while it runs, and has to put back."""

    environment: dict[str, str]
    working_directory: Path
    default_dtype: torch.dtype
    default_device: torch.device
    intra_op_threads: int
    deterministic_algorithms: bool
    deterministic_warns_only: bool
    grad_enabled: bool
    default_process_group: bool
    optimizer_hooks: int

    @classmethod
    def now(cls) -> ProcessState:
        return cls(
            environment={k: v for k, v in os.environ.items() if k not in _SET_BY_THE_RUNNER},
            working_directory=Path.cwd(),
            default_dtype=torch.get_default_dtype(),
            default_device=torch.get_default_device(),
            intra_op_threads=torch.get_num_threads(),
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            deterministic_warns_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            grad_enabled=torch.is_grad_enabled(),
            default_process_group=dist.is_available() and dist.is_initialized(),
            # The guard's goes with the last synchronised model: one stays if a trainer stays open.
            optimizer_hooks=len(_global_optimizer_pre_hooks),
        )


def _differences(before: ProcessState, after: ProcessState) -> list[str]:
    changed = []
    for field in fields(ProcessState):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new:
            continue
        if field.name == "environment":
            names = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
            changed.append(f"environment variables {', '.join(names)}")
        else:
            changed.append(f"{field.name}: {old} became {new}")
    return changed


def _lingering(known: set[threading.Thread]) -> list[threading.Thread]:
    """The new threads that would keep the process from ending, once they had time to stop."""
    deadline = time.monotonic() + THREADS_END_WITHIN_S
    new = [t for t in threading.enumerate() if t not in known and not t.daemon]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in new if thread.is_alive()]


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    before, threads = ProcessState.now(), set(threading.enumerate())
    yield
    leaks = _differences(before, ProcessState.now())
    leaks += [f"thread {thread.name!r} still runs" for thread in _lingering(threads)]
    if leaks:
        pytest.fail("the test leaks: " + "; ".join(leaks), pytrace=False)
