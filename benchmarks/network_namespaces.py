# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces that a virtual cable joins.

``python -m benchmarks.network_namespaces [--rate 1gbit] PROGRAM ...`` runs two ranks of a program
on each, with the variables that torchrun sets.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "cable"
"""The network interface of each."""
_RANKS_OF_A_HOST = 2


def are_possible() -> bool:
    """Whether this process may have network namespaces of its own."""
    try:
        done = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@contextmanager
def joined(prefix: str, *, rate: str | None = None) -> Iterator[tuple[str, str]]:
    """Make two namespaces, and yield their names; at the end kill what runs in them.

    Args:
        prefix: of the names; another one for each process that calls this.
        rate: how much the cable carries in each direction, as ``tc`` writes it (``1gbit``); None
            for what the machine can do.
    """
    names = (f"{prefix}near", f"{prefix}far")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        near, far = names
        cable = ("link", "add", CABLE, "netns", near, "type", "veth")
        _run("ip", *cable, "peer", "name", CABLE, "netns", far)
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            _run("ip", "-n", name, "link", "set", CABLE, "up")
            if rate is not None:
                queue = ("root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", CABLE, *queue)
        yield names
    finally:
        for name in names:
            found = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            if found.stdout.split():
                subprocess.run(["kill", "-9", *found.stdout.split()], check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network_namespaces")
    parser.add_argument("--rate", help="of the cable, in each direction, as tc writes it")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with joined(f"bench{os.getpid()}", rate=options.rate) as names:
        places = [name for name in names for _ in range(_RANKS_OF_A_HOST)]
        common = {
            "GLOO_SOCKET_IFNAME": CABLE,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29431",
            "WORLD_SIZE": str(len(places)),
        }
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *options.program],
                env={**os.environ, **common, "RANK": str(rank)},
            )
            for rank, name in enumerate(places)
        ]
        return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
