# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.audit.fresh POOL [NAME ...]``: the score on programs that nobody had seen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT_S = 400


def kind_of(program: Path) -> str:
    """``between``, ``alone``, ``data`` or ``right``."""
    found = re.search(r"^# KIND: (\w+)", program.read_text(), re.MULTILINE)
    assert found is not None, program
    return found.group(1)


def audited(program: Path) -> tuple[list[dict[str, object]], int]:
    """The findings, and the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        script, report = Path(folder) / "train.py", Path(folder) / "report.json"
        script.write_text(program.read_text())
        command = [sys.executable, "-m", "lockstep.cli", "audit", "--json", report, script]
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        held = json.loads(report.read_text()) if report.exists() else {"findings": []}
        return held["findings"], done.returncode


def main(pool: str, *names: str) -> None:
    score: Counter[str] = Counter()
    for program in sorted((HERE / pool).glob("*.txt")):
        if names and program.name.removesuffix(".py.txt") not in names:
            continue
        kind = kind_of(program)
        findings, code = audited(program)
        told = [(f["code"], f["severity"]) for f in findings]
        graver = [code for code, severity in told if severity != "notice"]
        score[kind] += 1
        if kind == "right":
            score["right, called wrong"] += bool(graver)
        else:
            score[f"{kind}, found"] += bool(graver)
            score[f"{kind}, noticed only"] += bool(told) and not graver
        print(
            f"{program.name.removesuffix('.py.txt'):14} {kind:8} exit {code:3} {told}", flush=True
        )
    print(dict(sorted(score.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
