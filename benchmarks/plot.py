# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.plot`: the ratios of the latest `make bench` as docs/benchmark.svg.

Run by the interpreter of the peers, which is where matplotlib is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.page import PICTURE, RESULTS, ROOT


def main() -> int:
    results = RESULTS / "bench" / "results.json"
    if not results.is_file():
        print(f"no results in {results.parent.relative_to(ROOT)}: run `make bench` first")
        return 1
    rows = json.loads(results.read_text())["rows"]
    draw([row for row in rows if row.get("theirs")])
    return 0


def draw(rows: list[dict[str, Any]]) -> None:
    """One line a row: the median ratio, its spread, and the goal as a tick."""
    import matplotlib

    matplotlib.use("svg")
    # Text as text, and no random names: the file changes only where the numbers do.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lockstep"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.28 * len(rows)), layout="constrained")
    places = range(len(rows), 0, -1)
    results = [row["result"] for row in rows]
    colours = ["#b03030" if row["verdict"] == "**missed**" else "#2060a0" for row in rows]
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
    sys.exit(main())
