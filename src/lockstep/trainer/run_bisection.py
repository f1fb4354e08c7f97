# SPDX-License-Identifier: Apache-2.0
"""Finds the first step in which two runs differ, and by what.

The logs of the runs say in which step something came out different. They hold a part of the
weights of each step only, and no data, so they rarely say why. Both runs are then computed again,
from the last step after which all their weights were alike, and what each step was computed from
is compared.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import LockstepError
from lockstep.trainer.logged_run import LoggedRun
from lockstep.trainer.step_capture import StepCapture, compare_captured
from lockstep.trainer.step_differences import compare_lines
from lockstep.trainer.step_replay import replay_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lockstep.trainer.step_capture import CapturedStep
    from lockstep.trainer.step_differences import StepDifference

_MOST_DIFFERENCES: Final = 8


@dataclass(frozen=True)
class CapturedRun:
    """Steps of a run that was computed again.

    Attributes:
        steps: by number.
        note: in what the run is not the one of its log; None if it is.
    """

    steps: Mapping[int, CapturedStep]
    note: str | None


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs.

    Attributes:
        folder: its `checkpoint_dir`, which is read and not changed.
        capture: computes some of its steps again.
    """

    folder: str
    capture: Callable[[range], CapturedRun]


def capture_run(
    make_trainer: Callable[..., Any],
    folder: str,
    config: Mapping[str, Any] | None,
    steps: range,
) -> CapturedRun:
    """Compute steps of a run again, and capture what they are computed from.

    Args:
        make_trainer: see `trainer_maker`.
        folder: the run's `checkpoint_dir`.
        config: entries over those of the config in the log.
        steps: their numbers.

    Raises:
        LockstepError: see `replay_run`.
    """
    capture = StepCapture(steps)
    report = replay_run(
        make_trainer, folder=folder, step=steps[-1], config=config, inspection=capture
    )
    note = None
    if report.same_bits is False:
        note = "; ".join(["has not the bits of its log", *report.reasons])
    return CapturedRun(capture.captured, note)


@dataclass(frozen=True)
class BisectionReport:
    """What two runs differ by; it prints as a few lines.

    Attributes:
        folders: of the runs, A and B.
        num_common: how many steps both of them have.
        num_compared: how many hashes, and means of metrics, in the logs were compared.
        step: the first step that differs; None if none does.
        differences: of that step, the likeliest cause first.
        settings: in what the programs of the runs differ: (name, in A, in B).
        notes: what could not be found out, and why.
    """

    folders: tuple[str, str]
    num_common: int
    num_compared: int
    step: int | None
    differences: Sequence[StepDifference]
    settings: Sequence[tuple[str, Any, Any]]
    notes: Sequence[str]

    def __str__(self) -> str:
        lines = [f"{name}: {folder}" for name, folder in zip("AB", self.folders, strict=True)]
        if self.step is not None:
            lines.append(f"they differ from step {self.step} on:")
            shown = self.differences[:_MOST_DIFFERENCES]
            lines += [f"  {each.what}{_values(each)}" for each in shown]
            more = len(self.differences) - len(shown)
            lines += [f"  and {more} more"] if more else []
        elif self.num_compared:
            lines.append(
                f"no difference in {self.num_common} steps: {self.num_compared} values are alike"
            )
        else:
            lines.append("nothing was compared: the logs have no hash or metric of the same step")
        lines += [f"{name}: {one} in A, {other} in B" for name, one, other in self.settings]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _values(difference: StepDifference) -> str:
    if difference.logged is None and difference.got is None:
        return ""
    return f": {difference.logged} in A, {difference.got} in B"


def bisect_runs(ours: ComparedRun, theirs: ComparedRun) -> BisectionReport:
    """Find the first step in which two runs differ, and by what.

    Raises:
        CheckpointError: a run has no log.
    """
    logs = LoggedRun.read(ours.folder), LoggedRun.read(theirs.folder)
    common = sorted(logs[0].steps.keys() & logs[1].steps.keys())
    lines = [(logs[0].steps[number].line, logs[1].steps[number].line) for number in common]
    # Where a checkpoint was due a line has all parts of the weights that are not empty.
    whole = max((len(line["w"]) for pair in lines for line in pair), default=0)
    alike, num_compared, step = (common[0] - 1 if common else 0), 0, None
    found: Sequence[StepDifference] = []
    notes: list[str] = []
    for number, pair in zip(common, lines, strict=True):
        compared = compare_lines(*pair)
        num_compared += compared.num_hashes + compared.num_means
        if compared.differences:
            step, found = number, compared.differences
            break
        if whole > 1 and all(len(line["w"]) == whole for line in pair):
            alike = number
    if step is not None:
        step, found, notes = _causes(ours, theirs, range(alike + 1, step + 1), found)
    return BisectionReport(
        (os.path.abspath(ours.folder), os.path.abspath(theirs.folder)),
        len(common),
        num_compared,
        step,
        found,
        [*_settings(logs, step or (common[-1] if common else 0))],
        notes,
    )


def _causes(
    ours: ComparedRun, theirs: ComparedRun, steps: range, logged: Sequence[StepDifference]
) -> tuple[int, Sequence[StepDifference], list[str]]:
    """The first step that differs and its causes; as the logs have it, where replays have none."""
    captured: list[Mapping[int, CapturedStep]] = []
    notes: list[str] = []
    for name, run in zip("AB", (ours, theirs), strict=True):
        try:
            again = run.capture(steps)
        except LockstepError as error:
            said = [error.what, *filter(None, map(error.details.get, ("got", "fix")))]
            return steps[-1], logged, [f"{name} was not computed again: {'; '.join(said)}"]
        notes += [] if again.note is None else [f"computed again, {name} {again.note}"]
        captured.append(again.steps)
    for step in steps:
        one, other = (each.get(step) for each in captured)
        if one is None or other is None:
            continue
        if found := compare_captured(step, one, other, have_bits=not notes):
            return step, found, notes
    return steps[-1], logged, notes


def _settings(logs: tuple[LoggedRun, LoggedRun], step: int) -> Iterator[tuple[str, Any, Any]]:
    """In what the programs that computed a step differ."""
    if not all(step in log.steps for log in logs):
        return
    ours, theirs = (log.program_of(step) for log in logs)
    yield from _unequal("", {"operator": ours["operator"]}, {"operator": theirs["operator"]})
    yield from _unequal("config ", logs[0].config_of(step), logs[1].config_of(step))
    for key in ("arguments", "machine"):
        yield from _unequal("", ours[key], theirs[key])


def _unequal(
    prefix: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name), theirs.get(name)
        if one != other:
            yield f"{prefix}{name}", one, other
