# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/how-to are programs, and their commands run as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "how-to"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in BLOCK.findall(page.read_text()) if name == language]


ELSEWHERE = {"cluster"}
"""On a cluster, by test_cluster_page.py."""
PROGRAMS = sorted(
    page for page in PAGES.glob("*.md") if blocks(page, "python") and page.stem not in ELSEWHERE
)
COMMANDS = [
    command
    for body in blocks(PAGES / "command-line.md", "bash")
    for command in body.replace("\\\n", " ").splitlines()
    if command.startswith("lockstep train")
]


def run(command: list[str], cwd: Path) -> str:
    examples = str(ROOT / "examples")
    path = os.pathsep.join([examples, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_pages_and_commands():
    assert {page.stem for page in PROGRAMS} == {
        "predict",
        "callbacks",
        "metrics",
        "profile",
        "tune",
    }
    assert len(COMMANDS) == 2


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.stem)
def test_a_page_runs_as_a_program(page, tmp_path):
    program = tmp_path / f"{page.stem}_page.py"
    program.write_text("\n\n".join(blocks(page, "python")))
    run([sys.executable, str(program)], cwd=tmp_path)


def test_the_commands_run(tmp_path):
    train, dry_run = (shlex.split(command)[1:] for command in COMMANDS)
    for arguments in (train, dry_run):
        arguments[1] = str(ROOT / arguments[1])
    shown = run([sys.executable, "-m", "lockstep.cli", *train], cwd=tmp_path)
    assert shown.count("epoch ") == 3
    assert (tmp_path / "out" / "digits.csv").is_file()
    assert (tmp_path / "out" / "digits.pt").is_file()
    shown = run([sys.executable, "-m", "lockstep.cli", *dry_run], cwd=tmp_path)
    assert "2 workers against one process: equal" in shown


def test_population_based_training_ends_with_the_better_learning_rate(tmp_path):
    shown = run([sys.executable, str(ROOT / "examples" / "population.py")], cwd=tmp_path)
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
