# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks growth`: how costs grow with workers, model, data and time.

Tables without goals: whether a line is flat, straight or steeper is what they are for. Everything
is measured on this machine; workers beyond its processors are logical.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Contender, run_once
from benchmarks.running_ray import running_ray
from benchmarks.steps import torchrun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONTENDERS = Path(__file__).with_name("contenders")
WORKERS = (1, 2, 4, 8, 16)
SAMPLES = tuple(10**exponent for exponent in range(3, 9))
THEIR_LARGEST = 10**7
"""torch's sampler makes a list of all indices: 10^8 would be 4 GB and a minute a process."""
BOTH = {"attach": "attach, ms", "their_attach": "DDP", "step": "step, ms", "their_step": "DDP"}


@dataclass(frozen=True)
class Table:
    """Columns by key of the rows, in order, with the titles that are shown."""

    title: str
    columns: dict[str, str]
    rows: list[dict[str, Any]]

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", f"| {' | '.join(self.columns.values())} |"]
        lines.append("|" + "---|" * len(self.columns))
        for row in self.rows:
            lines.append(f"| {' | '.join(_shown(row.get(key)) for key in self.columns)} |")
        return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _program(name: str, *arguments: object) -> dict[str, Any]:
    command = (sys.executable, str(CONTENDERS / f"{name}.py"), *map(str, arguments))
    return run_once(Contender(f"growth, {name}", command))


def of_workers() -> list[Table]:
    """A step of the tiny model, and the life of a trainer, at 1 to 16 workers."""
    rows = []
    with running_ray(max(WORKERS)):
        for count in WORKERS:
            steps = str(CONTENDERS / "steps.py")
            step = run_once(torchrun(steps, "--pairs", "8", "tiny", ranks=count))["tiny"]
            trainer = _program("calls", count)
            rows.append(
                {
                    "workers": count,
                    "step": statistics.median(step["ours"]),
                    "their_step": statistics.median(step["theirs"]),
                    "call": trainer["milliseconds"],
                    "start": trainer["start"],
                }
            )
    columns = {
        "workers": "workers",
        "step": "step, MLP 64x4, ms",
        "their_step": "DDP",
        "call": "train() of one step, ms",
        "start": "TorchTrainer(...), s",
    }
    return [Table("Workers", columns, rows)]


def of_model() -> list[Table]:
    """The reduction of ever more parameters, in ever more tensors, between two ranks."""
    measured = run_once(torchrun(str(CONTENDERS / "growth_sizes.py"), ranks=2))
    return [
        Table(
            "Parameters, in 10 tensors, 2 ranks",
            {"parameters": "parameters", **BOTH, "ratio": "step / DDP's"},
            measured["sizes"],
        ),
        Table(
            "Tensors, 100 000 parameters in all, 2 ranks",
            {"tensors": "tensors", **BOTH, "ratio": "step / DDP's"},
            measured["tensors"],
        ),
    ]


def of_data() -> list[Table]:
    """A shuffled order of ever more samples, one of two workers."""
    rows = []
    for size in SAMPLES:
        row: dict[str, Any] = {"samples": size, **_program("growth_data", "ours", size)}
        if size <= THEIR_LARGEST:
            theirs = _program("growth_data", "theirs", size)
            row |= {f"their_{key}": value for key, value in theirs.items()}
        rows.append(row)
    columns = {
        "samples": "samples",
        "mebibytes": "memory, MiB",
        "their_mebibytes": "DistributedSampler",
        "first": "to the first batch, ms",
        "their_first": "DistributedSampler",
        "middle": "resume in mid-epoch, ms",
        "their_middle": "DistributedSampler",
        "each": "a batch, us",
        "their_each": "DistributedSampler",
    }
    return [Table("Samples, shuffled, batches of 32", columns, rows)]


def of_time() -> list[Table]:
    """The metrics of a long run."""
    columns = {"steps": "steps", "each": "a step's metrics, us", "mebibytes": "memory, MiB"}
    return [Table("Steps of metrics", columns, _program("growth_metrics")["rows"])]


def of_driver() -> list[Table]:
    """The driver's own part of an epoch, and of a recovery, with up to 1 000 workers."""
    with running_ray(2):
        epochs = _program("growth_driver")["rows"]
        recoveries = _program("growth_recovery")["rows"]
    of_epochs = {
        "workers": "workers",
        "relays": "relays",
        "cpu": "driver CPU an epoch, ms",
        "wall": "driver time an epoch, ms",
        "messages": "messages an epoch",
        "kibibytes": "KiB an epoch",
    }
    of_recoveries = {
        "workers": "workers, of whom one dies",
        "relays": "relays",
        "cpu": "driver CPU a recovery, ms",
        "wall": "driver time a recovery, ms",
        "messages": "messages a recovery",
    }
    return [
        Table("The driver, workers simulated", of_epochs, epochs),
        Table("The driver when a worker dies, survivors simulated", of_recoveries, recoveries),
    ]


PARTS: dict[str, Callable[[], list[Table]]] = {
    "workers": of_workers,
    "model": of_model,
    "data": of_data,
    "time": of_time,
    "driver": of_driver,
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks growth", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("out", "benchmarks", "growth"))
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    tables: list[Table] = []
    for name in options.parts or PARTS:
        print(f"{name}:", file=sys.stderr)
        tables += PARTS[name]()
        _write(tables, options.out)
    print(_markdown(tables))
    return 0


def _markdown(tables: Sequence[Table]) -> str:
    return "\n\n".join(table.markdown() for table in tables)


def _write(tables: Sequence[Table], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = [asdict(table) for table in tables]
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    (folder / "results.md").write_text(_markdown(tables) + "\n")
