# SPDX-License-Identifier: Apache-2.0
"""Recorded traces: what the ranks of each program under ``tests/audit`` saw, for judging again.

A trace is the ledgers of all ranks, as JSON, compressed; paths are relative to the repository.
``python -m tests.audit.traces`` records those that are missing or whose program has changed, with
``--all`` all of them (5 minutes), or those that are named.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from pathlib import Path

from lockstep.audit.ledger import Ledger

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TRACES = HERE / "traces"
FOLDERS = ("bugs", "healthy")


def programs(folder: str) -> list[Path]:
    """The programs of a folder; those whose names begin with ``_`` are parts of others."""
    return sorted(p for p in (HERE / folder).glob("*.py") if not p.name.startswith("_"))


def trace_of(program: Path) -> Path:
    return TRACES / program.parent.name / f"{program.stem}.json.xz"


def read_trace(path: Path) -> list[Ledger]:
    """The ledgers of all ranks."""
    return [Ledger.from_bytes(data.encode()) for data in _contents(path)["ledgers"]]


def is_current(program: Path) -> bool:
    """Was the trace recorded of the program as it is?"""
    path = trace_of(program)
    return path.exists() and _contents(path)["program"] == _digest(program)


def write_trace(program: Path, ledgers: list[Ledger]) -> None:
    path = trace_of(program)
    path.parent.mkdir(parents=True, exist_ok=True)
    held = [led.to_bytes().decode().replace(f"{ROOT}/", "{root}/") for led in ledgers]
    whole = json.dumps({"program": _digest(program), "ledgers": held})
    path.write_bytes(lzma.compress(whole.encode(), preset=9))


def _contents(path: Path) -> dict[str, object]:
    return json.loads(lzma.decompress(path.read_bytes()).decode().replace("{root}/", f"{ROOT}/"))


def _digest(program: Path) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest()[:16]


def main(names: list[str]) -> None:
    from tests.audit.pool import Pool

    known = {program.stem: program for folder in FOLDERS for program in programs(folder)}
    if names == ["--all"]:
        names = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"no such program in {' or '.join(FOLDERS)}: {', '.join(unknown)}")
    names = names or [name for name, program in known.items() if not is_current(program)]
    pool = Pool()
    try:
        for name in names:
            write_trace(known[name], pool.ledgers(known[name]))
            print(trace_of(known[name]).relative_to(ROOT), flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
