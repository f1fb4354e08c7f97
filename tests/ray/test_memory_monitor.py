# SPDX-License-Identifier: Apache-2.0
"""Ray's memory monitor ends a worker: a loss like any other, from which the run recovers."""

import json
import os
import subprocess
import sys

import pytest
from tests.programs.blocks import ROOT


@pytest.mark.slow
@pytest.mark.alone  # what others take counts as well
@pytest.mark.timeout(240)
def test_a_worker_that_took_too_much_memory_is_replaced_and_no_bit_changes(tmp_path):
    # A cluster of its own: the monitor's settings are those of a cluster.
    program = ROOT / "tests" / "programs" / "greedy_worker.py"
    paths = filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    undisturbed, disturbed = map(json.loads, done.stdout.splitlines()[-2:])
    assert undisturbed["why"] == []
    assert disturbed["why"]
    assert all("memory" in why for why in disturbed["why"]), disturbed
    assert disturbed["lost"]
    assert disturbed["bits"] == undisturbed["bits"]
