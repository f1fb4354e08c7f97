# SPDX-License-Identifier: Apache-2.0
"""A fixture for pytest that audits a training script.

A project turns it on in its ``conftest.py``:
``pytest_plugins = ["lockstep.testing.pytest_plugin"]``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def lockstep_audit(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs ``lockstep audit``, and fails the test with its report where something is wrong.

    The fixture is a function ``audit(*words) -> dict``:

    Args:
        words: as after ``lockstep audit``: options, the script, the script's own arguments.

    Returns:
        What ``--json`` writes; warnings and notices are among its ``findings``.

    Gradient:
        None: the script runs in processes of its own.

    Collective:
        None in the test's process.

    Example:
        ``lockstep_audit("--steps", "20", "train.py", "--epochs", "1")``
    """
    report = tmp_path / "lockstep-audit.json"

    def audit(*words: str | Path) -> dict[str, Any]:
        command = [sys.executable, "-P", "-m", "lockstep.cli", "audit", "--json", str(report)]
        done = subprocess.run(
            [*command, *map(str, words)], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            said = f"{done.stdout}\n{done.stderr}".strip()
            pytest.fail(f"lockstep audit: exit code {done.returncode}\n{said}", pytrace=False)
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    return audit
