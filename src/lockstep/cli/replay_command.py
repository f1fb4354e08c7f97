# SPDX-License-Identifier: Apache-2.0
"""``lockstep replay``: computes a step of a run again, and compares it with the run's log."""

from __future__ import annotations

import itertools
import os
import pdb
import sys
from bdb import BdbQuit
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lockstep.cli.examined_steps_page import examination_page
from lockstep.cli.examined_steps_text import render_examination
from lockstep.cli.exit_codes import DIFFERS, FAILED, INTERRUPTED, USAGE, code_of
from lockstep.cli.fix_hints import with_cli_options
from lockstep.cli.logged_operator import import_logged_hook, import_logged_operator
from lockstep.cli.operator_config import load_config
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.operator import TrainingOperator
from lockstep.trainer import TorchTrainer
from lockstep.trainer.logged_run import LoggedRun
from lockstep.trainer.step_examination import StepExamination
from lockstep.trainer.step_inspection import StepInspection
from lockstep.trainer.step_replay import program_of, replay_run, trainer_maker

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


_AROUND: Final = 3


def run(read: argparse.Namespace) -> int:
    """Replay. Returns the exit code; the user's own exceptions pass through."""
    try:
        logged = LoggedRun.read(read.run)
        program = program_of(logged, read.step, read.run)
        _refuse_early(read)
        operator_cls = import_logged_operator(program, read.run, read.operator)
        hook = import_logged_hook(program)
        config = load_config(read.config, read.settings)
    except LockstepError as error:
        print(with_cli_options(error), file=sys.stderr)
        return USAGE
    inspection = _inspection(read, logged)
    try:
        report = replay_run(
            trainer_maker(TorchTrainer, operator_cls, hook),
            folder=read.run,
            step=read.step,
            config=config,
            num_workers=read.workers,
            shard=read.shard,
            inspection=inspection,
        )
    except LockstepError as error:
        print(with_cli_options(error), file=sys.stderr)
        return code_of(error)
    except BdbQuit:  # typed `quit` in the debugger
        return INTERRUPTED
    print(report)
    if isinstance(inspection, StepExamination):
        print(render_examination(inspection, read.step))
        if read.html is not None:
            _write_page(read, str(report), inspection)
    # Nothing is green that was not looked at.
    return {True: 0, False: DIFFERS, None: FAILED}[report.same_bits]


class _Debugger(StepInspection):
    """Runs one step under pdb.

    Args:
        step: its number.
        stops: given the trainer, a context in which the debugger stops.
    """

    def __init__(self, step: int, stops: Callable[[Any], AbstractContextManager[None]]) -> None:
        super().__init__(range(step, step + 1))
        self._stops = stops

    def around(self, trainer: Any) -> AbstractContextManager[None]:
        return self._stops(trainer)


def _refuse_early(read: argparse.Namespace) -> None:
    """Refuse what would fail after minutes of computing.

    Raises:
        ConfigurationError: options that exclude one another; a page that cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(read.html or ""))
    if read.html is not None and (os.path.isdir(read.html) or not os.access(folder, os.W_OK)):
        raise ConfigurationError(
            "the page cannot be written there",
            got=f"--html {read.html}",
            fix="name a file in a folder that exists",
        )
    examines = read.around is not None or read.html is not None
    debugs = read.pdb or read.breakpoint is not None
    if (examines and debugs) or (read.workers > 1 and (examines or debugs)):
        raise ConfigurationError(
            "these options do not go together",
            expected="one of --pdb, --breakpoint, and --around with --html; each in one process",
            fix="leave out --workers" if read.workers > 1 else "leave out --around and --html",
        )


def _inspection(read: argparse.Namespace, logged: LoggedRun) -> StepInspection | None:
    step = read.step
    if read.around is not None or read.html is not None:
        return StepExamination(logged.steps_around(step, read.around or _AROUND))
    if read.breakpoint is not None:
        return _Debugger(step, partial(_stop_at, place=read.breakpoint))
    return _Debugger(step, partial(_stop_in_loss, shard=read.shard)) if read.pdb else None


def _write_page(read: argparse.Namespace, verdict: str, examination: StepExamination) -> None:
    title = f"lockstep replay {read.run} --step {read.step}"
    page = examination_page(title, verdict, examination, read.step)
    with open(read.html, "w", encoding="utf-8") as file:
        file.write(page)
    print(f"page: {read.html}")


@contextmanager
def _stop_in_loss(trainer: TorchTrainer, shard: int | None) -> Iterator[None]:
    """Run `compute_loss` under pdb, for each shard or for one; else the operator's own loop."""
    operator = trainer.get_local_operator()
    loops = (TrainingOperator.train_batch, TrainingOperator.train_epoch)
    own = [loop.__name__ for loop in loops if operator._lockstep_overrides(loop)]
    name = own[0] if own else "compute_loss"
    method, shards = getattr(operator, name), itertools.count()

    def stop(*arguments: Any, **named: Any) -> Any:
        if next(shards) != shard and shard is not None and not own:
            return method(*arguments, **named)
        result = pdb.Pdb(nosigint=True).runcall(method, *arguments, **named)
        if result is None:  # typed `quit`: neither a loss nor metrics are None
            raise BdbQuit
        return result

    setattr(operator, name, stop)
    try:
        yield
    finally:
        delattr(operator, name)


@contextmanager
def _stop_at(trainer: TorchTrainer, place: tuple[str, int]) -> Iterator[None]:
    """Run under pdb, which stops at a line alone.

    Raises:
        ConfigurationError: there is no such line.
    """
    file, line = place
    debugger, before = pdb.Pdb(nosigint=True), sys.gettrace()
    if (problem := debugger.set_break(os.path.abspath(file), line)) is not None:
        raise ConfigurationError("no breakpoint can stand there", got=f"{file}:{line}: {problem}")
    debugger.rcLines.append("continue")
    debugger.reset()
    sys.settrace(debugger.trace_dispatch)
    try:
        yield
    finally:
        sys.settrace(before)
