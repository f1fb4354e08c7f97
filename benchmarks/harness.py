# SPDX-License-Identifier: Apache-2.0
"""Run contenders side by side: each its own process group, interleaved, on a quiet machine.

A contender is a program. It learns from the environment when it was launched and where to leave
its result (`benchmarks/contenders/reporting.py`), so nothing of the harness runs inside it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.verdict import UNDECIDED, Measured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.verdict import Result

STARTED_VARIABLE = "BENCHMARK_STARTED"
RESULT_VARIABLE = "BENCHMARK_RESULT"

BUSY_LIMIT = 0.15
"""How much of the machine may be in use by something else; the rest of the pair cancels."""
PATIENCE_S = 30.0
RUN_LIMIT_S = 300.0
PAIRS_LIMIT_S = 900.0
"""A program that measures several rows by itself."""
TAIL_LINES = 40
MOST_DOUBLINGS = 2
"""How often the rounds of a row that is undecided are doubled."""


class ContenderFailedError(RuntimeError):
    """A contender ended with an error, ran out of time, or left no result."""


@dataclass(frozen=True)
class Contender:
    """A program that measures itself.

    Attributes:
        name: as the table shows it.
        command: what to run, from the current directory.
        environment: variables on top of ours.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        value: the key of the result that is compared; smaller is better.
        goal: for ours / theirs, or with `theirs` None for our value itself, in `unit`; None
            where the row is only stated.
        note: a sentence for the reader, under the table.
    """

    name: str
    ours: Contender
    theirs: Contender | None
    value: str
    unit: str
    goal: float | None
    rounds: int
    note: str = ""


@dataclass(frozen=True)
class PairedRow:
    """One line of the table that a program measures by itself, both sides in the same processes.

    Attributes:
        key: where the program's result has ``{"ours": [...], "theirs": [...]}``, one value of
            each for two neighbouring blocks.
        against: the other side, as the table shows it.
    """

    key: str
    name: str
    against: str
    unit: str
    goal: float | None
    note: str = ""


@dataclass(frozen=True)
class Family:
    """Rows that are measured together.

    Attributes:
        measure: makes the rows; its argument is the number of rounds, None for its own.
        suites: in which of "bench", "full" and "gpu" it runs.
        ray_cpus: logical processors of the Ray that runs meanwhile; 0 for none.
        ray_module: what Ray's workers, which run on the head's interpreter, must be able to import.
    """

    measure: Callable[[int | None], list[Result]]
    suites: frozenset[str] = frozenset({"bench", "full"})
    ray_cpus: int = 0
    ray_module: str = "ray"


def family_of(*rows: Row, suites: Sequence[str] = ("bench", "full"), ray_cpus: int = 0) -> Family:
    """The family of rows whose contenders take turns as whole programs."""

    def measure_all(rounds: int | None) -> list[Result]:
        return [measure(row, rounds=rounds) for row in rows]

    return Family(measure_all, frozenset(suites), ray_cpus)


def measure(
    row: Row, *, rounds: int | None = None, settle: Callable[[], float] | None = None
) -> Measured:
    """Run the row's contenders in turns.

    The order turns around every round (A B, B A, A B ...): whoever always went second would
    always find warm caches.

    Args:
        rounds: so many, instead of the row's own number and of more for one that is undecided.
        settle: called before each round, returns how busy the machine is; by default
            `wait_until_quiet`.

    Raises:
        ContenderFailedError: a contender gave no result; its last output is in the message.
    """
    ours: list[float] = []
    theirs: list[float] = []
    busiest = 0.0

    def measured() -> Measured:
        return Measured(
            name=row.name,
            against=row.theirs.name if row.theirs else "-",
            unit=row.unit,
            goal=row.goal,
            ours=tuple(ours),
            theirs=tuple(theirs),
            busiest=busiest,
            quiet=busiest <= BUSY_LIMIT,
            note=row.note,
        )

    for number in _rounds(rounds, row.rounds, lambda: [measured()]):
        turn = [(row.ours, ours)]
        if row.theirs is not None:
            turn.append((row.theirs, theirs))
        busiest = max(busiest, (settle or wait_until_quiet)())
        for contender, values in turn if number % 2 == 0 else reversed(turn):
            values.append(run_once(contender)[row.value])
            print(f"  {row.name}: {contender.name} {values[-1]:.4g} {row.unit}", file=sys.stderr)
    return measured()


def measure_pairs(
    rows: Sequence[PairedRow],
    program: Contender,
    *,
    rounds: int | None,
    own_rounds: int = 1,
    settle: Callable[[], float] | None = None,
) -> list[Result]:
    """Run `program` several times, each time afresh, and take its pairs together.

    Args:
        rounds: as of `measure`.
        own_rounds: where `rounds` is None.

    Raises:
        ContenderFailedError: as `measure`.
    """
    found: dict[str, tuple[list[float], list[float]]] = {row.key: ([], []) for row in rows}
    busiest = 0.0

    def measured() -> list[Measured]:
        return [
            Measured(
                name=row.name,
                against=row.against,
                unit=row.unit,
                goal=row.goal,
                ours=tuple(found[row.key][0]),
                theirs=tuple(found[row.key][1]),
                busiest=busiest,
                quiet=busiest <= BUSY_LIMIT,
                note=row.note,
            )
            for row in rows
        ]

    for _ in _rounds(rounds, own_rounds, measured):
        busiest = max(busiest, (settle or wait_until_quiet)())
        result = run_once(program, limit_s=PAIRS_LIMIT_S)
        for key, (ours, theirs) in found.items():
            ours += result[key]["ours"]
            theirs += result[key]["theirs"]
    for one in measured():
        print("  " + " | ".join(one.cells()), file=sys.stderr)
    return [*measured()]


def _rounds(
    asked: int | None, own: int, measured: Callable[[], Sequence[Measured]]
) -> Iterator[int]:
    """The numbers of the rounds: as many as were asked for, else until each row is decided.

    The harness looks at the verdicts after the rows' own rounds, and after each doubling: who looks
    after every round, and stops at the one that pleases, measures what they hope for.
    """
    yield from range(asked or own)
    for doubling in range(0 if asked else MOST_DOUBLINGS):
        if all(row.verdict != UNDECIDED for row in measured()):
            return
        yield from range(own << doubling, own << doubling + 1)


def run_once(contender: Contender, *, limit_s: float = RUN_LIMIT_S) -> dict[str, Any]:
    """Run one contender to its end, and leave no process of it behind."""
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder, "result.json"), Path(folder, "output.txt")
        environment = {**os.environ, **contender.environment, RESULT_VARIABLE: str(result)}
        with output.open("wb") as stream:
            environment[STARTED_VARIABLE] = repr(time.monotonic())
            process = subprocess.Popen(
                contender.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = _wait_and_clear(process, limit_s)
        if code != 0 or not result.is_file():
            reason = f"no end within {limit_s:g} s" if code is None else f"exit code {code}"
            tail = "\n".join(output.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise ContenderFailedError(f"{contender.name}: {reason}, last output:\n{tail}")
        values: dict[str, Any] = json.loads(result.read_text())
        return values


def _wait_and_clear(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code, or None where the limit was reached; the whole group is gone after this."""
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_process_group(process)


def end_process_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process that was started in a session of its own."""
    # The group keeps the id of its first process, also after that one has ended.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_quiet(*, limit: float = BUSY_LIMIT, patience_s: float = PATIENCE_S) -> float:
    """Wait for a quiet machine, not for ever.

    Returns:
        How much of it was in use in the end, 0 to 1. A machine that is never quiet is measured
        all the same, and the table says so: neighbouring runs are disturbed alike.
    """
    deadline = time.monotonic() + patience_s
    busy = busy_fraction()
    while busy > limit and time.monotonic() < deadline:
        busy = busy_fraction()
    return busy


def busy_fraction(over_s: float = 1.0) -> float:
    """The part of all processors that was in use over the next `over_s` seconds."""
    if not Path("/proc/stat").is_file():
        return min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    idle_before, total_before = _processor_ticks()
    time.sleep(over_s)
    idle, total = _processor_ticks()
    return 1.0 - (idle - idle_before) / max(1, total - total_before)


def _processor_ticks() -> tuple[int, int]:
    first = Path("/proc/stat").read_text().split("\n", 1)[0]
    ticks = [int(field) for field in first.split()[1:9]]  # guest time is counted in user already
    return ticks[3] + ticks[4], sum(ticks)
