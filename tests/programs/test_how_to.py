# SPDX-License-Identifier: Apache-2.0
"""The commands of the page about the command line run as printed, and the population learns."""

import re
import shlex
import sys

import pytest
from tests.programs.blocks import ROOT, blocks_of, run

PAGE = ROOT / "docs" / "how-to" / "command-line.md"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

COMMANDS = [
    command
    for block in blocks_of(PAGE)
    for command in block.commands
    if command.startswith("lockstep train")
]


def test_the_commands_run(tmp_path):
    train, dry_run = (shlex.split(command)[1:] for command in COMMANDS)
    for arguments in (train, dry_run):
        arguments[1] = str(ROOT / arguments[1])
    shown = run([sys.executable, "-m", "lockstep.cli", *train], tmp_path)
    assert shown.count("epoch ") == 3
    assert (tmp_path / "out" / "digits.csv").is_file()
    assert (tmp_path / "out" / "digits.pt").is_file()
    shown = run([sys.executable, "-m", "lockstep.cli", *dry_run], tmp_path)
    assert "2 workers against one process: equal" in shown


def test_population_based_training_ends_with_the_better_learning_rate(tmp_path):
    shown = run([sys.executable, str(ROOT / "examples" / "population.py")], tmp_path)
    rows = [line.split() for line in shown.splitlines() if line.strip()[0:1].isdigit()]
    asked, in_use = ([float(row[column]) for row in rows] for column in (0, 1))
    assert len(rows) == 4
    # What a trial was told is what its optimizers use, whosever state it went on from.
    assert in_use == asked
    # Nobody stays at the rate that learns nothing.
    assert min(asked) > 1e-4
    accuracies = [float(row[2].rstrip("%")) for row in rows]
    assert max(accuracies) > 92
    best = re.search(r"the best: lr=(\S+),", shown)
    assert best is not None
    assert float(best[1]) >= 0.01
