# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: measure, print the table, fail where a goal is missed.

`python -m benchmarks growth` measures how costs grow, and judges nothing; `python -m benchmarks
page` puts the latest results into docs/benchmark.md.

Exit code: 1 when a ratio misses its goal, 2 when a contender failed, else 0: an undecided row (see
`benchmarks.verdict`) fails nothing, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import torch

from benchmarks import (
    audit,
    calls,
    checkpoints,
    contrastive,
    growth,
    hosts,
    memory,
    page,
    ray_train,
    recovering,
    recovery_cost,
    reproducibility,
    run_log,
    scaling,
    second_call,
    shadow,
    startup,
    steps,
    training,
    units,
)
from benchmarks.harness import ContenderFailedError, Family
from benchmarks.peers import interpreter_with
from benchmarks.running_ray import running_ray
from benchmarks.verdict import NotMeasured, Result, markdown

FAMILIES: dict[str, Family] = {
    "steps": steps.FAMILY,
    "steps_cuda": steps.CUDA_FAMILY,
    "contrastive": contrastive.FAMILY,
    "contrastive_full": contrastive.FULL_FAMILY,
    "checkpoint": checkpoints.FAMILY,
    "run_log": run_log.FAMILY,
    "shadow": shadow.FAMILY,
    "hosts": hosts.FAMILY,
    "scaling": scaling.FAMILY,
    "scaling_cuda": scaling.CUDA_FAMILY,
    "memory": memory.FAMILY,
    "startup": startup.FAMILY,
    "ray_train": ray_train.FAMILY,
    "recovery": recovering.FAMILY,
    "second_call": second_call.FAMILY,
    "training": training.FAMILY,
    "training_cuda": training.CUDA_FAMILY,
    "recovery_cost": recovery_cost.FAMILY,
    "reproducible": reproducibility.FAMILY,
    "calls": calls.FAMILY,
    "calls_full": calls.FULL_FAMILY,
    "audit": audit.FAMILY,
    "units": units.FAMILY,
    "units_cuda": units.CUDA_FAMILY,
}
"""In the order of the table. Those that need a Ray of the same size share one."""

COMMANDS = {"growth": growth.main, "page": page.main}
SUITES = ("bench", "full", "gpu")


def main() -> int:
    # As Ctrl-C does: what was started, a Ray most of all, is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        return COMMANDS[sys.argv[1]](sys.argv[2:])
    options = _options()
    if options.suite == "gpu" and not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure")
        return 0
    if options.suite != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Both sides talk over loopback; which name the machine has must not decide how fast.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    rows: list[Result] = []
    for ray, names in groupby(options.rows, key=_ray_of):
        with running_ray(*ray) if ray else nullcontext():
            for name in names:
                rows += _measured(name, options.rounds)
                _write(rows, options.out)
    print(markdown(rows))
    if any(isinstance(row, NotMeasured) and row.failed for row in rows):
        return 2
    return 1 if any(row.fails for row in rows) else 0


def _ray_of(name: str) -> tuple[int, str] | None:
    """Processors and interpreter of the Ray that the family needs."""
    family = FAMILIES[name]
    interpreter = interpreter_with(family.ray_module) or sys.executable
    return (family.ray_cpus, interpreter) if family.ray_cpus else None


def _measured(name: str, rounds: int | None) -> list[Result]:
    print(f"{name}:", file=sys.stderr)
    started = time.monotonic()
    try:
        return FAMILIES[name].measure(rounds)
    except ContenderFailedError as error:
        # The other families are still worth their time.
        print(error, file=sys.stderr)
        return [NotMeasured(name, "-", "-", "**failed**", failed=True)]
    finally:
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(FAMILIES)}; the suite by default")
    parser.add_argument("--suite", choices=SUITES, default="bench")
    parser.add_argument("--rounds", type=int, help="instead of each row's own number")
    parser.add_argument("--out", type=Path, help="a folder; out/benchmarks/SUITE by default")
    options = parser.parse_args()
    unknown = [name for name in options.rows if name not in FAMILIES]
    if unknown:
        parser.error(f"no such rows: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    chosen = options.rows or [
        name for name, family in FAMILIES.items() if options.suite in family.suites
    ]
    options.rows = [name for name in FAMILIES if name in chosen]
    options.out = options.out or Path("out", "benchmarks", options.suite)
    return options


def _write(rows: list[Result], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    machine = {
        "processors": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    content = {"machine": machine, "rows": [row.as_json() for row in rows]}
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    where = f"{machine['processors']} processors, {machine['system']}, torch {machine['torch']}"
    measured = f"Measured on {datetime.now(UTC):%Y-%m-%d}: {where}."
    (folder / "results.md").write_text(f"{measured}\n\n{markdown(rows)}\n")


if __name__ == "__main__":
    sys.exit(main())
