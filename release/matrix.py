# SPDX-License-Identifier: Apache-2.0
"""Run a part of the tests under other versions of Python, torch and Ray: `make matrix CELL=NAME`.

A cell has an environment of its own, which is deleted afterwards (a torch with its CUDA packages
takes 6 GB). Its result goes into docs/versions-tried.json, and the table of docs/versions.md is
made of that: a cell that nobody has run says so. ``--list`` prints the cells. The workflow
`versions` runs all of them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
RESULTS = ROOT / "docs" / "versions-tried.json"
TABLE = re.compile(r"(<!-- cells -->\n).*?(<!-- end -->)", re.DOTALL)

TOOLS: Final = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "scikit-learn",
    "torchmetrics",
    "datasets",
    "torchdata",
)
TESTS: Final = (
    "tests/unit/sync",
    "tests/unit/checkpoint",
    "tests/unit/data",
    "tests/unit/operator",
    "tests/unit/test_torch_compat.py",
    "tests/ranks/test_oracle_table.py",
    "tests/ranks/test_ddp_exact.py",
    "tests/ranks/test_gather_exact.py",
    "tests/ranks/test_replicate_exact.py",
    "tests/ranks/test_sums_in_shard_order.py",
    "tests/released",
    "tests/procs",
    "tests/audit/test_traces.py",
    "tests/audit/test_in_code.py",
    "tests/ray/test_ddp_trainer.py",
    "tests/ray/test_durable.py",
    "tests/ray/test_fsdp_trainer.py",
    "tests/ray/test_parameter_server.py",
    "tests/ray/test_recovery.py",
    "tests/ray/test_same_bits.py",
    "tests/ray/test_units_trainer.py",
)
"""Every sync, recovery, checkpoints, recorded traces of the audit, and torch's insides."""


@dataclass(frozen=True)
class Cell:
    """One combination of versions.

    Attributes:
        python: the name of the interpreter.
        torch, ray: as pip takes them.
        requirements: further ones.
    """

    python: str
    torch: str
    ray: str
    requirements: tuple[str, ...] = ()

    @property
    def installed(self) -> tuple[str, ...]:
        return (f"torch{self.torch}", f"ray{self.ray}", *self.requirements)


CELLS: Final = {
    "oldest": Cell("python3.11", "==2.12.*", "==2.60.*", ("numpy<2.3",)),
    "torch2.13": Cell("python3.11", "==2.13.*", "==2.60.*"),
    "torch2.14": Cell("python3.11", "==2.14.*", "==2.60.*"),
    "newest": Cell("python3.11", ">=2.15", ">=2.60"),
    "python3.12-oldest": Cell("python3.12", "==2.12.*", "==2.60.*"),
    "python3.12": Cell("python3.12", ">=2.13", ">=2.60"),
    "python3.13-oldest": Cell("python3.13", "==2.12.*", "==2.60.*"),
    "python3.13": Cell("python3.13", ">=2.13", ">=2.60"),
}


def run_cell(name: str) -> dict[str, Any]:
    """Install a cell, run its tests, and delete it again."""
    cell = CELLS[name]
    interpreter = shutil.which(cell.python)
    if interpreter is None:
        raise SystemExit(f"{name} needs {cell.python}, which is not on the PATH")
    with tempfile.TemporaryDirectory(prefix="lockstep-matrix-") as place:
        subprocess.run([interpreter, "-m", "venv", place], check=True)
        python = str(Path(place, "bin", "python"))
        print(f"{name}: installing {' '.join(cell.installed)} for {cell.python}", flush=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *cell.installed, *TOOLS, "-e", f"{ROOT}[ray]"], check=True)
        versions = json.loads(subprocess.check_output([python, "-c", _VERSIONS], text=True))
        print(f"{name}: {versions}", flush=True)
        started = time.monotonic()
        tests = [python, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", *TESTS]
        done = subprocess.run(
            tests, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        print(done.stdout, flush=True)
    return {
        **versions,
        "passed": done.returncode == 0,
        "summary": done.stdout.splitlines()[-1].strip("= "),
        "seconds": round(time.monotonic() - started),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": _git("rev-parse", "--short=8", "HEAD")
        + "+" * bool(_git("diff", "HEAD", "--", ".", ":!docs")),
    }


_VERSIONS: Final = """
import json, platform
from importlib.metadata import version
names = ("torch", "ray", "numpy")
print(json.dumps({"python": platform.python_version(), **{name: version(name) for name in names}}))
"""


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def table(results: dict[str, dict[str, Any]]) -> str:
    """The cells as the page shows them."""
    lines = ["| cell | Python | torch | Ray | result | when, commit |", "|---|---|---|---|---|---|"]
    for name, cell in CELLS.items():
        found = results.get(name)
        if found is None:
            asked = (cell.python.removeprefix("python"), cell.torch, cell.ray)
            lines.append(f"| {name} | {' | '.join(asked)} | *not run* | |")
            continue
        result = f"{'passed' if found['passed'] else '**failed**'}: {found['summary']}"
        versions = f"{found['python']} | {found['torch']} | {found['ray']}"
        lines.append(f"| {name} | {versions} | {result} | {found['date']}, {found['commit']} |")
    return "\n".join(lines)


def write_page(results: dict[str, dict[str, Any]]) -> None:
    """Put the table between its marks."""
    made = f"\\1\n{table(results)}\n\n\\2"
    PAGE.write_text(TABLE.sub(made, PAGE.read_text()))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=", ".join(CELLS))
    parser.add_argument("--list", action="store_true", help="print the cells")
    parser.add_argument("--names", action="store_true", help="print their names, as JSON")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name}: {' '.join(cell.installed)}" for name, cell in CELLS.items()))
        return 0
    if options.names:
        print(json.dumps(list(CELLS)))
        return 0
    if unknown := [name for name in options.cells if name not in CELLS]:
        parser.error(f"no such cell: {', '.join(unknown)}; there are {', '.join(CELLS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name in options.cells:
        results[name] = run_cell(name)
        RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
        write_page(results)
    return 0 if all(results[name]["passed"] for name in options.cells) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
