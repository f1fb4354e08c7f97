# SPDX-License-Identifier: Apache-2.0
"""Training as Accelerate, Lightning and transformers document it, unmodified: nothing is found.

Models are tiny and random, data are made on the spot. `make test-all` installs the libraries.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "real"
SCRIPTS = sorted(HERE.glob("[a-z]*.py"))
NOTICED = {"accelerate_multi_process_metrics": ["LS505"]}
"""Rows that are there twice are left out by hand, after they were gathered: nobody can see that."""
ABORTED_AT_EXIT = "terminate called without an active exception"


def _audited(script, folder, code=0):
    """The report of a run on two ranks, and what was printed."""
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.cli", "audit", "--json", report, script],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    # torch may abort an interpreter that ends before its gloo threads have let their last tensors
    # go (pytorch issue 190489), and most of these scripts destroy no group.
    died_at_exit = done.returncode == 128 + signal.SIGABRT and ABORTED_AT_EXIT in done.stderr
    assert done.returncode == code or died_at_exit, done.stderr
    return json.loads(report.read_text()), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("script", [pytest.param(s, id=s.stem) for s in SCRIPTS])
def test_a_documented_script_is_in_lockstep(script, tmp_path):
    held, said = _audited(script, tmp_path)
    noticed = NOTICED.get(script.stem, [])
    assert [(found["code"], found["severity"]) for found in held["findings"]] == [
        (code, "notice") for code in noticed
    ]
    assert held["steps"] > 1
    assert held["world_size"] == 2
    assert "2 ranks" in said
    assert "in lockstep" in said


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_accelerate_repeats_and_nobody_leaves_out_is_noticed(tmp_path):
    """50 samples in batches of 4 on two ranks: some are there twice."""
    text = (HERE / "accelerate_classifier.py").read_text()
    script = tmp_path / "gathered.py"
    script.write_text(
        text.replace("gather_for_metrics", "gather").replace("total == len", "total > len")
    )
    held, _ = _audited(script, tmp_path)
    assert [(found["code"], found["severity"]) for found in held["findings"]] == [
        ("LS505", "notice")
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_the_sampler_of_lightning_repeats_is_a_notice(tmp_path):
    text = (HERE / "lightning_autoencoder.py").read_text()
    script = tmp_path / "uneven.py"
    odd = "DataLoader(TensorDataset(data[:15][0]), 4))"
    script.write_text(text.replace("DataLoader(data, 4))", odd))
    held, _ = _audited(script, tmp_path)
    assert [(found["code"], found["severity"]) for found in held["findings"]] == [
        ("LS505", "notice")
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_accelerate_that_counts_one_process_is_named(tmp_path):
    """Without GPUs it joins the ranks only if it is told to train on CPUs."""
    text = (HERE / "accelerate_classifier.py").read_text()
    script = tmp_path / "plain.py"
    script.write_text(text.replace("Accelerator(cpu=True)", "Accelerator()"))
    held, _ = _audited(script, tmp_path, code=65)
    (found,) = [each for each in held["findings"] if each["code"] == "LS503"]
    assert "`num_processes` is 1" in found["message"]
    assert "Accelerator(cpu=True)" in found["fix"]


def test_three_of_each():
    by_library = [script.stem.split("_")[0] for script in SCRIPTS]
    for library in ("accelerate", "fabric", "lightning", "transformers"):
        assert by_library.count(library) >= 3
