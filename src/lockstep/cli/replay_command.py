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

from lockstep.cli.fix_hints import with_cli_options
from lockstep.cli.operator_config import load_config
from lockstep.cli.operator_import import import_operator
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.operator import TrainingOperator
from lockstep.trainer import TorchTrainer
from lockstep.trainer.logged_run import LoggedRun
from lockstep.trainer.step_replay import program_of, replay_run

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

DIFFERS: Final = 65
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130

_NAME_IT: Final = "--operator path/to/file.py:Operator"
_TRAINS: Final = "the run's program trains as soon as it is imported"


def run(read: argparse.Namespace) -> int:
    """Replay. Returns the exit code; the user's own exceptions pass through."""
    try:
        logged = LoggedRun.read(read.run)
        program = program_of(logged, read.step, read.run)
        operator_cls = _import(read, program)
        config = load_config(read.config, read.settings)
    except LockstepError as error:
        print(with_cli_options(error), file=sys.stderr)
        return USAGE
    try:
        report = replay_run(
            partial(TorchTrainer, training_operator_cls=operator_cls),
            folder=read.run,
            step=read.step,
            config=config,
            num_workers=read.workers,
            shard=read.shard,
            around_step=_debugger(read),
        )
    except LockstepError as error:
        print(with_cli_options(error), file=sys.stderr)
        return FAILED
    except BdbQuit:  # typed `quit` in the debugger
        return INTERRUPTED
    print(report)
    # Nothing is green that was not looked at.
    return {True: 0, False: DIFFERS, None: FAILED}[report.same_bits]


def _import(read: argparse.Namespace, program: dict[str, Any]) -> type[TrainingOperator]:
    with _no_trainer_is_made():
        if read.operator is not None:
            return import_operator(read.operator)
        if program["operator"] is not None:
            return _import_logged(program["operator"], program["folder"])
    raise ConfigurationError(
        "the log cannot say which operator the run trained",
        where=read.run,
        got=program["unnamed"],
        fix=_NAME_IT,
    )


def _import_logged(name: str, folder: str) -> type[TrainingOperator]:
    try:
        return import_operator(name, folder)
    except ConfigurationError as error:
        if error.what == _TRAINS:
            raise
        raise ConfigurationError(
            "the operator that the log names cannot be imported any more",
            where=folder,
            expected=name,
            got=error.what,
            fix=_NAME_IT,
        ) from error


@contextmanager
def _no_trainer_is_made() -> Iterator[None]:
    """Refuse trainers while the run's program is imported: it would train once more.

    Raises:
        ConfigurationError: the program makes a trainer outside of its main block.
    """
    initialize = TorchTrainer.__init__

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigurationError(
            _TRAINS,
            fix='move what makes and calls the trainer below `if __name__ == "__main__":`',
        )

    TorchTrainer.__init__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchTrainer.__init__ = initialize  # type: ignore[method-assign]


def _debugger(
    read: argparse.Namespace,
) -> Callable[[TorchTrainer], AbstractContextManager[None]] | None:
    if read.breakpoint is not None:
        return partial(_stop_at, place=read.breakpoint)
    return partial(_stop_in_loss, shard=read.shard) if read.pdb else None


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
        debugger = pdb.Pdb(nosigint=True)
        result = debugger.runcall(method, *arguments, **named)
        if debugger.quitting:  # `runcall` returns None then
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
