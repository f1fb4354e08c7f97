# SPDX-License-Identifier: Apache-2.0
"""What runs on a code host is what runs here: make's targets, and the cells of the matrix.

`make check` compares the files with the schema of GitHub's workflows.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from release.matrix import CELLS

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_its_targets_exist(workflow):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {each.split()[1] for each in commands(workflow) if each.startswith("make ")}
    assert asked
    assert asked <= targets


def test_its_cells_are_those_of_the_table():
    (listing,) = (each for path in WORKFLOWS for each in commands(path) if "release.matrix" in each)
    (inner,) = re.findall(r"\$\((.*)\)", listing)
    command = inner.replace("python", sys.executable, 1)
    names = subprocess.check_output(command, shell=True, cwd=ROOT, text=True)
    assert json.loads(names) == list(CELLS)


def test_a_change_is_checked_as_by_hand():
    (tests,) = (path for path in WORKFLOWS if path.stem == "tests")
    by_hand = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "make" in line]
    assert commands(tests) == [line for line in by_hand if line.startswith("make ")]
