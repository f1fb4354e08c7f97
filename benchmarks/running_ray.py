# SPDX-License-Identifier: Apache-2.0
"""A Ray head of our own, running before the measured programs and ended after.

`ray stop` ends every Ray process of the user, other clusters included, so it is not used: the head
runs in the foreground of its own process group, and that group is ended.

Ray 2.60 listens on all interfaces whatever `--node-ip-address` says (a loopback address is replaced
by the machine's). So the head asks for a token, made here for this one run. It is said explicitly:
with the mode left open, `ray start` asks for the user's own token where there is one, and
`ray.init()` to a running head does not send it.
"""

from __future__ import annotations

import os
import secrets
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
LOOPBACK = "127.0.0.1"


@contextmanager
def running_ray(num_cpus: int, interpreter: str = sys.executable) -> Iterator[str]:
    """Yield the address of a running head; inside, `ray.init()` in a program we start finds it.

    Args:
        num_cpus: logical processors; more than there are is allowed.
        interpreter: of the head, and so of every worker.

    Raises:
        RuntimeError: the head ended or did not answer within START_LIMIT_S; its output is shown.
    """
    address = f"{LOOPBACK}:{_free_port()}"
    # Short on purpose: Ray puts sockets below it, whose paths may not exceed about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="lsb"))
    ours = {
        "RAY_ADDRESS": address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with _environment(ours):
        head = _start(_command(address, folder / "ray", num_cpus, interpreter), folder)
        try:
            _wait_until_it_answers(head, address, folder / "head.log")
            yield address
        finally:
            _end(head)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "head.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _command(address: str, folder: Path, num_cpus: int, interpreter: str) -> list[str]:
    return [
        str(Path(interpreter).with_name("ray")),
        *("start", "--head", "--block", "--disable-usage-stats"),
        f"--port={address.split(':')[1]}",
        f"--num-cpus={num_cpus}",
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
