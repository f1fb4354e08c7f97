# SPDX-License-Identifier: Apache-2.0
"""`LoggedRun`: reads the log that `RunLog` writes beside a run's checkpoints."""

from __future__ import annotations

import ast
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.errors import CheckpointError
from lockstep.trainer.run_log import FILE_NAME, FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class LoggedStep:
    """A line of the log.

    Attributes:
        line: see `lockstep.trainer.run_log`; ``lr`` is there in each.
        program: the number of the program that computed the step, from 0.
    """

    line: Mapping[str, Any]
    program: int


@dataclass(frozen=True)
class LoggedRun:
    """The log of a run.

    Attributes:
        programs: what each program that computed steps of the run, and the latest one, have told of
            themselves; one that loaded a state in between is another one from there on.
        steps: the steps of the run, by number; of an abandoned continuation there are none.
        changes: the steps after which something else than training may have changed the state, and
            what did.
    """

    programs: list[dict[str, Any]]
    steps: dict[int, LoggedStep]
    changes: list[tuple[int, str]]

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> LoggedRun:
        """Read the log of the run whose `checkpoint_dir` is `folder`.

        Raises:
            CheckpointError: there is none, or it is of a later version.
        """
        run = cls([], {}, [])
        rates: Any = []
        for line in _lines(os.path.join(folder, FILE_NAME)):
            if "run" in line:
                _refuse_later_format(line["run"], folder)
                run._go_back_to(line["run"]["from"])
                run._forget_idle_program()
                run.programs.append(line["run"])
            elif "changed" in line:
                run._go_back_to(line["changed"])
                run.changes.append((line["changed"], line["by"]))
            elif "step" in line and run.programs:
                rates = line.setdefault("lr", rates)
                run.steps[line["step"]] = LoggedStep(line, len(run.programs) - 1)
        if not run.programs:
            raise CheckpointError(
                "this directory has no log of a run",
                where=os.path.abspath(folder),
                expected=f"{FILE_NAME}, which TorchTrainer(..., checkpoint_dir=...) writes",
            )
        return run

    def _go_back_to(self, step: int) -> None:
        for later in [each for each in self.steps if each > step]:
            del self.steps[later]
        self.changes[:] = [each for each in self.changes if each[0] <= step]

    def _forget_idle_program(self) -> None:
        """Forget the latest program if it has computed no step: it began with another state."""
        latest = len(self.programs) - 1
        if self.programs and all(each.program < latest for each in self.steps.values()):
            self.programs.pop()

    def steps_around(self, step: int, most: int) -> range:
        """A step with at most so many before and after it, which the same program computed.

        Nothing but training has changed the state between them.
        """
        first = last = step
        while step - first < most and self._leads_on(first - 1):
            first -= 1
        while last - step < most and self._leads_on(last):
            last += 1
        return range(first, last + 1)

    def _leads_on(self, step: int) -> bool:
        """Whether the same program trained on from a step to the next one."""
        if not {step, step + 1} <= self.steps.keys() or step in dict(self.changes):
            return False
        return self.steps[step].program == self.steps[step + 1].program

    def program_of(self, step: int) -> dict[str, Any]:
        """What the program that computed a step has told of itself."""
        return self.programs[self.steps[step].program]

    def config_of(self, step: int) -> dict[str, Any]:
        """The config of that program, without the keys that the log could not keep."""
        config: dict[str, Any] = ast.literal_eval(self.program_of(step)["config"])
        return config


def _lines(path: str) -> Iterator[dict[str, Any]]:
    """The whole lines of a log; a killed program may have left half of one."""
    try:
        with open(path, "rb") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    yield line
    except (FileNotFoundError, NotADirectoryError):
        return


def _refuse_later_format(run: Mapping[str, Any], folder: Any) -> None:
    if run["format"] > FORMAT:
        raise CheckpointError(
            "the log is of a later version of lockstep",
            where=os.path.abspath(folder),
            expected=f"format {FORMAT}, or an earlier one",
            got=f"format {run['format']}",
            fix="pip install --upgrade lockstep-train",
        )
