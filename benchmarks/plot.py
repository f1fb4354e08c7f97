# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.plot`: the ratios of the latest `make bench` as docs/benchmark.svg.

With the word ``memory`` it runs a step of a model in units, and of the same model whole, and draws
the memory of a worker as docs/pictures/memory.svg.

Run by the interpreter of the peers, which is where matplotlib is.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.harness import run_once
from benchmarks.page import PICTURE, RESULTS, ROOT
from benchmarks.steps import torchrun
from benchmarks.units import MODEL, PROGRAM, RANKS
from benchmarks.verdict import MISSED, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Sequence

MEMORY = ROOT / "docs" / "pictures" / "memory.svg"


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["memory"]:
        draw_memory({side: _trace(side) for side in ("whole", "torch", "units")})
        return 0
    results = RESULTS / "bench" / "results.json"
    if not results.is_file():
        print(f"no results in {results.parent.relative_to(ROOT)}: run `make bench` first")
        return 1
    rows = json.loads(results.read_text())["rows"]
    draw([row for row in rows if row.get("theirs")])
    return 0


def _trace(side: str) -> list[tuple[float, float]]:
    options = ("--side", side, "--trace")
    found = run_once(torchrun(PROGRAM, *options, ranks=RANKS, name=side))
    trace: list[tuple[float, float]] = found["trace"]
    return trace


def draw_memory(traces: dict[str, list[tuple[float, float]]]) -> None:
    """The memory of a worker over one step, the step's length as one."""
    pyplot = _pyplot()
    names = {"whole": "replicate", "torch": "fully_shard by hand", "units": 'sync="fsdp", in units'}
    colours = {"whole": "#999999", "torch": "#d08020", "units": "#2060a0"}
    heights = {"whole": 0, "torch": -7, "units": 7}  # two of the lines end at one place
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    for side, trace in traces.items():
        moments, sizes = zip(*trace, strict=True)
        axes.plot([each / moments[-1] for each in moments], sizes, color=colours[side])
        axes.annotate(
            names[side],
            (1.0, sizes[-1]),
            xytext=(6, heights[side]),
            textcoords="offset points",
            color=colours[side],
            fontsize=8,
            va="center",
            annotation_clip=False,
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"one step: forward, backward, optimizer ({MODEL})", fontsize=8)
    axes.set_ylabel("MiB of a worker", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(MEMORY, metadata={"Date": None})


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # Text as text, and no random names: the file changes only where the numbers do.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lockstep"})
    from matplotlib import pyplot

    return pyplot


COLOURS = {MISSED: "#b03030", UNDECIDED: "#999999"}
"""Of the verdicts; blue for the others."""


def draw(rows: list[dict[str, Any]]) -> None:
    """One line a row: the median ratio, its spread, and the goal as a tick."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.28 * len(rows)), layout="constrained")
    places = range(len(rows), 0, -1)
    results = [row["result"] for row in rows]
    colours = [COLOURS.get(row["verdict"], "#2060a0") for row in rows]
    axes.errorbar(
        results, places, xerr=[row["spread"] for row in rows], fmt="none", ecolor="#999999"
    )
    axes.scatter(results, places, c=colours, zorder=3)
    goals = [(row["goal"], place) for row, place in zip(rows, places, strict=True) if row["goal"]]
    axes.scatter(*zip(*goals, strict=True), marker="|", s=120, c="#202020", zorder=2)
    axes.axvline(1.0, color="#cccccc", linewidth=1, zorder=0)
    axes.set_yticks(list(places), [f"{row['name']}  vs  {row['against']}" for row in rows])
    axes.tick_params(axis="y", labelsize=7, length=0)
    axes.set_xlabel("time, ours / theirs; bar: spread, tick: goal")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
