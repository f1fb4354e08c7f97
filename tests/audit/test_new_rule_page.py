# SPDX-License-Identifier: Apache-2.0
"""The rule that CONTRIBUTING.md shows can be copied: it is linted, typed and judges traces."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.audit.traces import ROOT, programs, read_trace, trace_of

from lockstep.audit.world import World


@pytest.fixture(scope="module")
def block():
    (found,) = re.findall(
        r"```python\n(# SPDX.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    return found


def test_it_is_linted_and_formatted(block, tmp_path):
    file = tmp_path / "micro_batches.py"
    file.write_text(block)
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for command in (["check"], ["format", "--check"]):
        ruff = [str(Path(sys.executable).with_name("ruff")), *command, *config, str(file)]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_it_finds_ranks_that_ran_different_numbers_of_backwards(block):
    made = {}
    exec(compile(block, "CONTRIBUTING.md", "exec"), made)
    rule = made["RULE"]
    found = {
        program.stem: list(rule.judge(World(read_trace(trace_of(program)))))
        for program in programs("bugs")
        if program.stem.startswith(("a_", "i_skips"))
    }
    assert [f.code for f in found["i_skips_a_step"]] == ["LS399"]
    assert not any(found[name] for name in found if name.startswith("a_"))
