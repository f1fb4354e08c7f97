# SPDX-License-Identifier: Apache-2.0
"""What connecting to Ray leaves of the program's own, and what it refuses before it connects."""

import os
import subprocess
import sys

from tests.ray_variables import without_ray_variables

CONNECTS = """
import random, signal
from lockstep.engine.cluster import connect

def mine(*_):
    raise KeyboardInterrupt

for handler in (mine, signal.SIG_IGN):
    signal.signal(signal.SIGTERM, handler)
    drawn = random.getstate()
    try:
        connect()
    except Exception as error:
        print(type(error).__name__, error)
    print(signal.getsignal(signal.SIGTERM) is handler, random.getstate() == drawn)
"""


def connect_to(address, folder):
    environment = without_ray_variables() | {"RAY_ADDRESS": address, "RAY_TMPDIR": str(folder)}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CONNECTS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_joining_a_cluster_leaves_the_sigterm_handler_and_what_is_drawn(tmp_path):
    """Ray sets a handler of its own first, and finds then that this is no address."""
    printed = connect_to("no address", tmp_path)
    assert "Error" in printed
    assert [line for line in printed.splitlines() if " " in line].count("True True") == 2


def test_ray_client_is_refused_before_it_connects(tmp_path):
    printed = connect_to("ray://127.0.0.1:1", tmp_path)
    assert printed.count("NotAvailableError [LS003] a trainer cannot train through Ray Client") == 2
    assert "RAY_ADDRESS=ray://127.0.0.1:1" in printed
    assert printed.count("True True") == 2
