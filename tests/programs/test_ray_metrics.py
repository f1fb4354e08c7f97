# SPDX-License-Identifier: Apache-2.0
"""The metrics that Ray serves, read where Prometheus would read them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("metrics_read_back.py")
ROWS, EPOCH = 104, 7
"""Samples and global batches of an epoch there."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_loss_samples_and_recoveries_are_there():
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trained, validated, while_it_runs, afterwards = json.loads(done.stdout.splitlines()[-1])

    def value(name, phase="train", **further):
        return while_it_runs["|".join([f"lockstep_{name}", "a run", phase, *further.values()])]

    assert value("loss") == pytest.approx(trained["train_loss"])
    assert value("loss", "validation") == pytest.approx(validated["val_loss"])
    assert value("metric", "validation", metric="val_accuracy") == validated["val_accuracy"]
    assert value("step") == 2 * EPOCH
    assert value("samples_total") == 2 * ROWS
    assert value("samples_total", "validation") == ROWS
    assert value("samples_per_second") > 0
    assert value("recoveries_total") == 1
    assert afterwards["lockstep_samples_per_second|a run|train"] == 0
