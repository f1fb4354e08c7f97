# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.contrastive`: the loss of CLIP over two ranks, time and memory.

`lockstep.info_nce` beside the dense forms: open_clip's loss in its best mode (local rows, a gather
with gradient), torch's differentiable gather, and the recipe that puts a rank's own rows back.
Each is a pair of processes of its own; a round runs all of them one after the other.
65536 rows are more than the dense forms can hold, and are run without them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import BUSY_LIMIT, Contender, Family, run_once, wait_until_quiet
from benchmarks.verdict import Measured, NotMeasured, Result, markdown

PROGRAM = Path(__file__).with_name("contenders") / "contrastive_loss.py"
SIZES = (2048, 8192, 16384)
FULL_SIZE = 65536
REPETITIONS = {2048: 7, 8192: 3, 16384: 1, FULL_SIZE: 1}
OTHERS = {
    "open_clip": "open_clip, local_loss, gather_with_grad",
    "torch": "torch.distributed.nn all_gather, dense",
    "put-back": "put-back recipe, loss x N",
}
GOALS = {16384: (0.48, 0.03)}
"""Of time and memory; 1 for other sizes. The larger the batch, the more there is to leave out."""
BEST = "open_clip"
MORE_ROUNDS = {16384: 2}
"""Of the best of the others, which carries the goal; each of the rest is far away from it."""
ALL_UP_TO = 8192
"""Rows up to which the rest take part in the short suite: they take 15 s for one step of 16384."""
OPEN_CLIP_VERSION = "3.3.0"
LIMIT_S = 600.0


def open_clip_folder() -> Path | None:
    """Where open_clip's sources are, fetched if need be; None if there is no index to ask."""
    folder = Path("out", "open_clip").absolute()
    if not (folder / "open_clip" / "loss.py").is_file():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--target", str(folder), f"open_clip_torch=={OPEN_CLIP_VERSION}"]
        if subprocess.run(command, check=False).returncode != 0:
            return None
    return folder


def contender(way: str, size: int, folder: Path | None) -> Contender:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    arguments = ("--nproc-per-node", "2", str(PROGRAM), way, str(size), str(REPETITIONS[size]))
    environment = {"OMP_NUM_THREADS": "1"}
    if folder is not None:
        environment["OPEN_CLIP_FOLDER"] = str(folder)
    return Contender(way, (*launch, *arguments), environment)


def measure_contrastive(
    sizes: tuple[int, ...] = SIZES, *, rounds: int = 1, all_up_to: int = FULL_SIZE
) -> list[Result]:
    """Two rows, time and memory, for each size and each of the other ways.

    Args:
        all_up_to: beyond it only the best of the others takes part.

    Raises:
        ContenderFailedError: a contender gave no result.
    """
    folder = open_clip_folder()
    others = [way for way in OTHERS if way != BEST or folder is not None]
    rows: list[Result] = []
    for size in sizes:
        rivals = others if size <= all_up_to else [way for way in others if way == BEST]
        ways = ["lockstep"] if size == FULL_SIZE else ["lockstep", *rivals]
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        busiest = 0.0
        for number in range(rounds + (MORE_ROUNDS.get(size, 0) if folder is not None else 0)):
            busiest = max(busiest, wait_until_quiet())
            taking_part = ways if number < rounds else ["lockstep", BEST]
            for way in taking_part if number % 2 == 0 else reversed(taking_part):
                found[way].append(run_once(contender(way, size, folder), limit_s=LIMIT_S))
                print(f"  {size}: {way} {found[way][-1]}", file=sys.stderr)
        if folder is None and size != FULL_SIZE:
            name = f"InfoNCE, {size} x 256, 2 ranks"
            rows.append(NotMeasured(name, OTHERS[BEST], "-", "not installed"))
        for way in ways[1:] or [None]:
            rows += _rows(size, way, found, busiest)
    return rows


def _rows(
    size: int, other: str | None, found: dict[str, list[dict[str, float]]], busiest: float
) -> list[Measured]:
    theirs = found[other] if other is not None else []
    time_goal, memory_goal = GOALS.get(size, (1.0, 1.0))
    return [
        Measured(
            name=f"InfoNCE, {size} x 256, 2 ranks: {what}",
            against="-" if other is None else OTHERS[other],
            unit=unit,
            goal=goal if other is not None else None,
            ours=tuple(result[key] for result in found["lockstep"][: len(theirs) or None]),
            theirs=tuple(result[key] for result in theirs),
            busiest=busiest,
            quiet=busiest <= BUSY_LIMIT,
        )
        for key, what, unit, goal in (
            ("seconds", "forward and backward", "s", time_goal),
            ("mebibytes", "peak memory of a rank above its inputs", "MiB", memory_goal),
        )
    ]


FAMILY = Family(
    lambda rounds: measure_contrastive(rounds=rounds or 1, all_up_to=ALL_UP_TO),
    frozenset({"bench"}),
)
FULL_FAMILY = Family(
    lambda rounds: measure_contrastive((*SIZES, FULL_SIZE), rounds=rounds or 1), frozenset({"full"})
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contrastive", description=__doc__)
    known = ", ".join(map(str, REPETITIONS))
    parser.add_argument("sizes", nargs="*", type=int, help=f"of {known}; all but the last")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    if not set(options.sizes) <= set(REPETITIONS):
        parser.error(f"sizes are {known}")
    sizes = tuple(options.sizes) or SIZES
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    rows = measure_contrastive(sizes, rounds=options.rounds)
    print(markdown(rows))
    return 1 if any(row.fails for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
