# SPDX-License-Identifier: Apache-2.0
"""A Ray head of our own, on loopback, running before the measured programs and ended after.

`ray stop` ends every Ray process of the user, other people's clusters included, so it is not used:
the head runs in the foreground of its own process group, and that group is ended.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import end_process_group

if TYPE_CHECKING:
    from collections.abc import Iterator

START_LIMIT_S = 60.0
END_LIMIT_S = 20.0
NUM_CPUS = 4
LOOPBACK = "127.0.0.1"


@contextmanager
def running_ray() -> Iterator[str]:
    """Yield the address of a running head; RAY_ADDRESS names it while it runs.

    Raises:
        RuntimeError: the head ended or did not answer within START_LIMIT_S; its output is shown.
    """
    address = f"{LOOPBACK}:{_free_port()}"
    # Short on purpose: Ray puts sockets below it, whose paths may not exceed about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="lsb"))
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(
            _command(address, folder / "ray"),
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    before = os.environ.get("RAY_ADDRESS")
    try:
        _wait_until_it_answers(head, address, folder / "head.log")
        os.environ["RAY_ADDRESS"] = address
        yield address
    finally:
        if before is None:
            os.environ.pop("RAY_ADDRESS", None)
        else:
            os.environ["RAY_ADDRESS"] = before
        _end(head)
        shutil.rmtree(folder, ignore_errors=True)


def _command(address: str, folder: Path) -> list[str]:
    host, port = address.split(":")
    return [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--head", "--block", "--disable-usage-stats"),
        f"--node-ip-address={host}",
        f"--port={port}",
        f"--num-cpus={NUM_CPUS}",
        "--include-dashboard=false",
        f"--temp-dir={folder}",
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_it_answers(head: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and head.poll() is None:
        # The port opens before the node has joined; Ray says this line when both are there.
        if "Ray runtime started" in log.read_text(errors="replace"):
            return
        time.sleep(0.2)
    raise RuntimeError(f"no Ray head at {address}:\n{log.read_text(errors='replace')}")


def _end(head: subprocess.Popen[bytes]) -> None:
    """Ask first, so that the head ends its own children, then end what is left."""
    head.terminate()
    with suppress(subprocess.TimeoutExpired):
        head.wait(timeout=END_LIMIT_S)
    end_process_group(head)
