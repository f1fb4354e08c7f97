# SPDX-License-Identifier: Apache-2.0
"""What crosses the link between two hosts of two ranks each, beside what DDP's ring sends."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from benchmarks.hosts import PROGRAM
from benchmarks.network_namespaces import are_possible

pytestmark = pytest.mark.skipif(
    not are_possible(), reason="no network namespaces of one's own here"
)


def test_two_thirds_of_what_a_ring_sends(tmp_path):
    """With N ranks on H hosts 2 (H - 1) / H of the gradients, and the ring's 2 (N - 1) / N."""
    told = tmp_path / "told"
    launcher = [sys.executable, "-m", "benchmarks.network_namespaces"]
    done = subprocess.run(
        [*launcher, str(PROGRAM), "--width", "768", "--pairs", "3"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "BENCHMARK_RESULT": str(told)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sent = json.loads(told.read_text())["mebibytes"]
    gradients = 6 * 769 * 768 * 4 / 2**20
    # In both directions; headers of packets are a fifth of a percent, and counts of the round.
    assert median(sent["theirs"]) == pytest.approx(2 * 1.5 * gradients, rel=0.03)
    assert median(sent["ours"]) == pytest.approx(2 * 1.0 * gradients, rel=0.03)
