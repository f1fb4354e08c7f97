# SPDX-License-Identifier: Apache-2.0
"""``lockstep replay``: computes a step of a run again, and compares it with the run's log."""

from __future__ import annotations

import os
import pdb
import sys
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


def run(read: argparse.Namespace) -> int:
    """Replay. Returns the exit code; the user's own exceptions pass through."""
    try:
        logged = LoggedRun.read(read.run)
        program = program_of(logged, read.step, read.run)
        operator_cls = _import(read, program)
        config = {**logged.config_of(read.step), **load_config(read.config, read.settings)}
    except LockstepError as error:
        print(with_cli_options(error), file=sys.stderr)
        return USAGE
    try:
        report = replay_run(
            TorchTrainer,
            read.run,
            read.step,
            operator_cls=operator_cls,
            config=config,
            num_workers=read.workers,
            shard=read.shard,
            around_step=_debugger(read),
        )
    except LockstepError as error:
        print(with_cli_options(error), file=sys.stderr)
        return FAILED
    print(report)
    return 0 if report.same_bits else DIFFERS


def _import(read: argparse.Namespace, program: dict[str, Any]) -> type[TrainingOperator]:
    with _no_trainer_is_made():
        if read.operator is not None:
            return import_operator(read.operator)
        if program["operator"] is not None:
            return import_operator(program["operator"], program["folder"])
    raise ConfigurationError(
        "the log cannot say which operator the run trained",
        where=read.run,
        got=program["unnamed"],
        fix="--operator path/to/file.py:Operator",
    )


@contextmanager
def _no_trainer_is_made() -> Iterator[None]:
    """Refuse trainers while the run's program is imported: it would train once more.

    Raises:
        ConfigurationError: the program makes a trainer outside of its main block.
    """
    initialize = TorchTrainer.__init__

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigurationError(
            "the run's program trains as soon as it is imported",
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
    """Run the user's `compute_loss` under pdb; `train_batch` where a loop has its own."""
    operator = trainer.get_local_operator()
    has_own_loop = operator._lockstep_overrides(TrainingOperator.train_batch)
    name = "train_batch" if has_own_loop else "compute_loss"
    method, calls = getattr(operator, name), iter(range(1 << 62))

    def stop(*arguments: Any, **named: Any) -> Any:
        number = next(calls)
        if has_own_loop or shard is None or number == shard:
            return pdb.runcall(method, *arguments, **named)
        return method(*arguments, **named)

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
    debugger = pdb.Pdb()
    if (problem := debugger.set_break(os.path.abspath(file), line)) is not None:
        raise ConfigurationError("no breakpoint can stand there", got=f"{file}:{line}: {problem}")
    debugger.rcLines.append("continue")
    debugger.reset()
    sys.settrace(debugger.trace_dispatch)
    try:
        yield
    finally:
        sys.settrace(None)
