# SPDX-License-Identifier: Apache-2.0
"""The harness takes turns, clears up, and judges; the contenders here are small real programs.

Nothing is timed: the programs report fixed numbers.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import growth, page, peers
from benchmarks.contenders import recovery_work
from benchmarks.harness import (
    Contender,
    ContenderFailedError,
    PairedRow,
    Row,
    end_process_group,
    measure,
    measure_pairs,
    run_once,
)
from benchmarks.running_ray import running_ray
from benchmarks.verdict import (
    MISSED,
    REACHED,
    UNDECIDED,
    Measured,
    NotMeasured,
    interval_of_median,
    markdown,
)

REPORTING = Path(__file__).resolve().parents[1] / "benchmarks" / "contenders"


def program(name: str, lines: str) -> Contender:
    prelude = "import os, subprocess, sys\nfrom reporting import report, seconds_since_launch\n"
    return Contender(
        name, (sys.executable, "-c", prelude + lines), environment={"PYTHONPATH": str(REPORTING)}
    )


def measured(ours: tuple[float, ...], theirs: tuple[float, ...], goal: float | None) -> Measured:
    return Measured("work", "other", "s", goal, ours, theirs, busiest=0.0, quiet=True)


def test_contenders_take_turns_and_the_order_turns_around(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    write = f"open({str(journal)!r}, 'a').write(NAME); report(value=3.0 if NAME == 'A' else 2.0)"
    row = Row(
        name="work",
        ours=program("A", f"NAME = 'A'; {write}"),
        theirs=program("B", f"NAME = 'B'; {write}"),
        value="value",
        unit="s",
        goal=1.0,
        rounds=3,
    )
    result = measure(row, settle=lambda: 0.25)
    assert journal.read_text() == "ABBAAB"
    assert (result.ours, result.theirs) == ((3.0,) * 3, (2.0,) * 3)
    assert result.result == 1.5
    assert result.verdict == MISSED
    assert (result.busiest, result.quiet) == (0.25, False)


def test_the_launch_is_before_the_program_and_the_clock_is_shared() -> None:
    assert run_once(program("clock", "report(seconds=seconds_since_launch())"))["seconds"] > 0


def test_a_contender_that_fails_is_shown() -> None:
    with pytest.raises(ContenderFailedError, match=r"broken: exit code 3[\s\S]*the last words"):
        run_once(program("broken", "print('the last words'); sys.exit(3)"))


def test_a_contender_without_a_result_is_a_failure() -> None:
    with pytest.raises(ContenderFailedError, match="silent: exit code 0"):
        run_once(program("silent", "pass"))


def test_a_contender_that_hangs_is_ended() -> None:
    with pytest.raises(ContenderFailedError, match=r"hanging: no end within 0\.2 s"):
        run_once(program("hanging", "import signal; signal.pause()"), limit_s=0.2)


def test_ending_a_process_group_ends_the_children(tmp_path: Path) -> None:
    """A pipe ends when the last process that holds it open is gone: no clock, no polling."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = tmp_path / "child.py"
    child.write_text(
        "import signal, sys\n"
        "stream = open(sys.argv[1], 'w')\n"
        "print('up', file=stream, flush=True)\n"
        "signal.pause()\n"
    )
    command = [sys.executable, str(child), str(pipe)]
    parent = f"import subprocess; subprocess.run({command!r})"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    with pipe.open() as stream:
        assert stream.readline() == "up\n"
        end_process_group(process)
        assert stream.read() == ""


def test_the_result_is_the_median_of_the_ratios_of_neighbours() -> None:
    """Medians taken apart would say 2 / 10: a slow phase of the machine would be a result."""
    row = measured(ours=(1.0, 2.0, 100.0), theirs=(1.0, 20.0, 10.0), goal=1.0)
    assert row.result == 1.0


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ((1.0, 1.0, 1.0), REACHED),
        ((1.1, 1.1, 1.1), MISSED),
        ((0.7, 0.8, 0.9), REACHED),
        ((0.9, 1.1, 1.3), UNDECIDED),  # the goal lies within the spread of 0.1
        ((0.7, 0.9, 1.3), UNDECIDED),
        ((1.1, 1.2, 1.3), MISSED),
        ((0.9, 0.9, 50.0), UNDECIDED),
        ((1.2,), MISSED),  # a single round has no spread to hide in
        # Many rounds pin the median down, although single ones scatter about it.
        ((0.8, 0.9, 1.2) * 40, REACHED),
        ((0.8, 1.1, 1.2) * 40, MISSED),
        ((0.8, 0.99, 1.01, 1.3) * 30, UNDECIDED),
    ],
)
def test_a_goal_is_reached_or_missed_beyond_the_spread(
    ours: tuple[float, ...], verdict: str
) -> None:
    assert measured(ours, (1.0,) * len(ours), 1.0).verdict == verdict


def test_the_interval_of_a_median_holds_it_in_95_of_100_samples() -> None:
    generator = random.Random(0)
    held = 0
    for _ in range(1000):
        low, high = interval_of_median([generator.expovariate(1.0) for _ in range(20)])
        held += low <= math.log(2) <= high
    assert 940 <= held <= 985
    # The 2nd and the 9th of ten, by the tables of the sign test.
    assert interval_of_median(range(10)) == (1, 8)
    assert interval_of_median(range(5)) == (-math.inf, math.inf)


def test_a_row_that_is_undecided_is_measured_longer(tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    counting = f"stream = open({str(counter)!r}, 'a'); number = stream.tell(); stream.write('.')\n"
    row = PairedRow("work", "work", against="other", unit="ms", goal=1.0)

    def runs(ratios: str, rounds: int | None = None) -> int:
        counter.unlink(missing_ok=True)
        pairs = program("both", f"{counting}report(work={{'ours': {ratios}, 'theirs': [1.0] * 2}})")
        measure_pairs([row], pairs, rounds=rounds, own_rounds=1, settle=lambda: 0.0)
        return len(counter.read_text())

    assert runs("[0.8, 0.9]") == 1
    assert runs("[0.8, 1.2]") == 4
    assert runs("[0.8, 1.2]", rounds=2) == 2
    # Undecided after the first run, decided after two.
    assert runs("[0.8, 1.2] if number == 0 else [0.8, 0.8]") == 2


def test_a_row_without_another_contender_is_held_by_its_value() -> None:
    row = measured((8.0, 9.0, 13.0), (), goal=10.0)
    assert row.result == 9.0
    assert row.verdict == UNDECIDED
    assert measured((8.0, 9.0, 9.5), (), goal=10.0).verdict == REACHED


def test_the_table_says_what_was_missed_and_when_the_machine_was_busy() -> None:
    good = measured((1.0, 1.0), (2.0, 2.0), goal=1.0)
    bad = Measured("slow", "other", "s", 1.0, (3.0,), (1.0,), busiest=0.5, quiet=False)
    table = markdown([good, bad])
    assert "| work | other | 1 s | 2 s | 0.5 ± 0 | ≤ 1 | reached |" in table
    assert "| slow | other | 3 s | 1 s | 3 | ≤ 1 | **missed** |" in table
    assert "`slow`: the machine was not quiet, 50% of it in use beforehand." in table


def test_a_program_that_takes_turns_with_itself_gives_its_pairs() -> None:
    pairs = program("both", "report(small={'ours': [1.0, 2.0], 'theirs': [2.0, 1.0]})")
    row = PairedRow("small", "work", against="other", unit="ms", goal=1.0)
    (result,) = measure_pairs([row], pairs, rounds=2, settle=lambda: 0.0)
    assert isinstance(result, Measured)
    assert (result.ours, result.theirs) == ((1.0, 2.0) * 2, (2.0, 1.0) * 2)
    assert result.samples == (0.5, 2.0, 0.5, 2.0)


def test_only_a_ratio_fails_the_benchmark() -> None:
    """Seconds are the machine's: a goal in seconds is shown as missed, and fails nothing."""
    assert measured((2.0, 2.0), (1.0, 1.0), goal=1.0).fails
    assert not measured((1.0, 1.0), (1.0, 1.0), goal=1.0).fails
    alone = measured((20.0, 20.0), (), goal=10.0)
    assert (alone.verdict, alone.fails) == ("**missed**", False)


def test_a_row_without_a_goal_is_stated_and_says_why() -> None:
    row = measured((2.0, 2.0), (1.0, 1.0), goal=None)
    assert (row.verdict, row.fails) == ("stated", False)
    noted = Measured("plain", "other", "s", None, (2.0,), (1.0,), 0.0, quiet=True, note="because.")
    assert "| plain | other | 2 s | 1 s | 2 | - | stated |" in markdown([noted])
    assert "`plain`: because." in markdown([noted])


def test_what_was_not_measured_stands_in_the_table() -> None:
    row = NotMeasured("work", "somebody", "≤ 1", "not installed")
    assert "| work | somebody | - | - | - | ≤ 1 | not installed |" in markdown([row])
    assert not row.fails


def test_a_module_that_nobody_has_is_not_found() -> None:
    assert peers.interpreter_with("no_such_framework") is None
    assert peers.interpreter_with("torch") == sys.executable


def test_results_are_put_between_the_marks_of_their_part(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "results.md").write_text("| new |\n")
    part = "<!-- results: {} -->\n{}\n<!-- end -->\n"
    text = "a\n" + part.format("bench", "old") + "b\n" + part.format("full", "kept")
    filled, missing = page.filled(text, tmp_path)
    assert filled.startswith("a\n<!-- results: bench -->\n")
    assert "\n| new |\n\n<!-- end -->\nb\n" in filled
    assert "old" not in filled
    assert "kept" in filled
    assert missing == ["full"]


def test_a_recovery_ends_with_the_first_step_after_it(tmp_path: Path) -> None:
    """Neither with a step that was on its way, nor where a worker joins later, and all wait."""
    notes = {
        "one": [(9.8, 5), (10.01, 6), (10.5, 4), (10.6, 5), (10.7, 6), (10.9, 7), (11.0, 8)],
        "dead": [(9.8, 5), (9.99, 6)],
        "joined": [(15.0, 9)],
    }
    for name, steps in notes.items():
        text = "".join(f"{at} {step} 0 {len(name)}\n" for at, step in steps)
        (tmp_path / name).write_text(text)
    found = recovery_work.outcome(str(tmp_path), killed_at=10.0)
    assert {name: round(value, 6) for name, value in found.items()} == {
        "seconds": 0.5,
        "new": 0.9,
        "redone": 2.0,
    }


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_relays_spare_the_driver_messages() -> None:
    """An epoch is one call of each worker, and a recovery two calls of each survivor."""
    with running_ray(2):
        epochs = growth._program("growth_driver", 3, 130)["rows"]
        recoveries = growth._program("growth_recovery", 3, 130)["rows"]
    found = [[(row["relays"], row["messages"]) for row in rows] for rows in (epochs, recoveries)]
    assert found == [
        [(None, 6), (None, 260), (3, 6)],
        [(None, 8), (None, 516), (3, 12)],
    ]
