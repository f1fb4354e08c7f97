# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: measure, print the table, fail where a goal is missed.

Exit code: 0 when every goal is reached, 1 when one is missed by more than its spread, 2 when a
contender failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

import torch

from benchmarks import second_call, startup
from benchmarks.harness import ContenderFailedError, Row, measure
from benchmarks.running_ray import running_ray
from benchmarks.verdict import Measured, markdown

ROWS: dict[str, Row] = {
    "startup": startup.ROW,
    "prestarted": startup.PRESTARTED_ROW,
    "second_call": second_call.ROW,
}


def main() -> int:
    options = _options()
    # Both sides talk over loopback; which name the machine has must not decide how fast.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    try:
        with running_ray():
            rows = [measure(ROWS[name], rounds=options.rounds) for name in options.rows]
    except ContenderFailedError as error:
        print(error, file=sys.stderr)
        return 2
    _write(rows, options.out)
    print(markdown(rows))
    return 0 if all(row.reached for row in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all by default")
    parser.add_argument("--rounds", type=int, help="instead of each row's own number")
    parser.add_argument("--out", type=Path, default=Path("out", "benchmarks"))
    options = parser.parse_args()
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    options.rows = options.rows or list(ROWS)
    return options


def _write(rows: list[Measured], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    machine = {
        "processors": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    content = {"machine": machine, "rows": [row.as_json() for row in rows]}
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    (folder / "results.md").write_text(markdown(rows) + "\n")


if __name__ == "__main__":
    sys.exit(main())
