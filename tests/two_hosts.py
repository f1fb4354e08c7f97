# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces joined by a cable, a node of Ray's in each.

A link that is set down carries no packet and no reset: what a power failure looks like, or a
switch that fails.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.network_namespaces import ADDRESSES, CABLE, joined
from tests.ray_variables import without_ray_variables

NEAR, FAR = ADDRESSES
PORT = 6399
_RAY = Path(sys.executable).parent / "ray"

# What Ray does within half a minute, within some seconds: nodes that do not answer are dead.
QUICK = json.dumps(
    {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 500,
        "health_check_failure_threshold": 4,
    }
)


class TwoHosts:
    """The driver's host and another one, with `cpus` CPUs of Ray's on each.

    Args:
        cpus: of the near and of the far host.
        patient: Ray takes half a minute to notice that a host is gone; else some seconds.
    """

    def __init__(self, cpus=(2, 2), *, patient=True):
        self._prefix = f"ls{os.getpid()}"
        self._cpus, self._patient = cpus, patient
        # Ray puts sockets below it, whose paths may not exceed about 100 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="ls"))

    def __enter__(self):
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._names = stack.enter_context(joined(self._prefix))
            near, far = self._names
            config = () if self._patient else ("--system-config", QUICK)
            self._start(near, NEAR, self._cpus[0], "--head", "--port", str(PORT), *config,
                        "--include-dashboard=false")  # fmt: skip
            self._start(far, FAR, self._cpus[1], "--address", f"{NEAR}:{PORT}")
            self._leave = stack.pop_all().__exit__
        return self

    def __exit__(self, *exception):
        self._leave(*exception)

    def _start(self, name, address, cpus, *options):
        _run(
            "ip", "netns", "exec", name, str(_RAY), "start", "--node-ip-address", address,
            "--num-cpus", str(cpus), "--disable-usage-stats", *options,
            env=self._environment(),
        )  # fmt: skip

    def _environment(self):
        return without_ray_variables() | {
            "HOME": str(self.folder),
            "RAY_TMPDIR": str(self.folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "NEAR_ADDRESS": f"{NEAR}:{PORT}",
            "FAR_NAMESPACE": self._names[1],
            "FOLDER": str(self.folder),
        }

    def told_by(self, program, *arguments, timeout_s):
        """What a program on the near host printed."""
        return subprocess.run(
            ["ip", "netns", "exec", self._names[0], sys.executable, program, *arguments],
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def set_link(is_up):
    """For a program on the near host: the cable of the far one."""
    state = "up" if is_up else "down"
    _run("ip", "-n", os.environ["FAR_NAMESPACE"], "link", "set", CABLE, state)


def _run(*command, env=None):
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
