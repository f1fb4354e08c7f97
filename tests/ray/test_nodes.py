# SPDX-License-Identifier: Apache-2.0
"""A machine dies with the workers on it, and another one joins."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

PROGRAMS = Path(__file__).parents[1] / "programs"


def _told_by(program):
    """What a program with a cluster of its own printed."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # Of its own, so that nobody else on this machine finds the cluster and joins it. Short: Ray
    # puts sockets below it, whose paths may not exceed about 100 characters.
    folder = tempfile.mkdtemp(prefix="ls")
    environment |= {"RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / program)],
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray prints lines of its own, of the node that died, at any time.
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(result)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_dies_in_the_middle_and_the_run_goes_on():
    assert _told_by("two_nodes.py") == {
        "nodes": 2,
        "within reach": True,
        "same": True,
        "alone": 1,
        "recoveries": 1,
        "together": 2,
    }


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_dies_with_a_relay_and_with_a_worker_of_another_nodes_relay():
    assert _told_by("relays_on_two_nodes.py") == {
        "here": [True, False, False, False],
        "same": True,
        "lost": ["rank 1", "rank 2", "rank 3"],
        "workers": 1,
    }


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver has to have none")
def test_auto_means_the_gpus_of_other_machines_too():
    told = _told_by("gpus_elsewhere.py")
    assert told == {"nowhere": False, "elsewhere": True, "not for the spare": False}
