# SPDX-License-Identifier: Apache-2.0
"""Training as Accelerate, Lightning and transformers document it, unmodified: nothing is found.

Models are tiny and random, data are made on the spot. `make test-all` installs the libraries.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "real").glob("*.py"))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("script", [pytest.param(s, id=s.stem) for s in SCRIPTS])
def test_a_documented_script_is_in_lockstep(script, tmp_path):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.cli", "audit", "--json", report, script],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    held = json.loads(report.read_text())
    assert held["findings"] == []
    assert held["steps"] > 1
    assert held["world_size"] == 2
    assert "2 ranks" in done.stderr
    assert "in lockstep" in done.stderr


def test_three_of_each():
    by_library = [script.stem.split("_")[0] for script in SCRIPTS]
    for library in ("accelerate", "fabric", "lightning", "transformers"):
        assert by_library.count(library) >= 3
