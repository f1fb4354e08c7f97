# SPDX-License-Identifier: Apache-2.0
"""Which Ray a trainer joins, and which it leaves alone."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest

import ray

CONNECTS = """
import ray
from lockstep.engine.cluster import connect
print(connect(), connect(), ray.get_runtime_context().gcs_address)
"""


@pytest.mark.slow
def test_another_programs_private_ray_is_left_alone():
    """The session's Ray runs beside it, and was offered to nobody."""
    # Short: Ray puts sockets below it, whose paths may not exceed about 100 characters.
    folder = tempfile.mkdtemp(prefix="ls")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", CONNECTS], env=environment, capture_output=True, text=True
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    first, second, address = done.stdout.split()
    assert (first, second) == ("True", "True")  # its own, also when it is asked again
    assert address != ray.get_runtime_context().gcs_address
