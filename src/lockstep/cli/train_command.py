# SPDX-License-Identifier: Apache-2.0
"""``lockstep train``: trains an operator for some epochs, or checks one step (``--dry-run``)."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.cli.exit_codes import FAILED, INTERRUPTED, USAGE, code_of
from lockstep.cli.fix_hints import with_cli_options
from lockstep.cli.missing_keys import note_missing_key
from lockstep.cli.operator_config import load_config
from lockstep.cli.operator_import import import_operator
from lockstep.cli.train_options import SAVING_OPTIONS, TRAINER_OPTIONS
from lockstep.errors import (
    CheckpointWriteError,
    ConfigurationError,
    LockstepError,
    NotAvailableError,
)
from lockstep.trainer import TorchTrainer

if TYPE_CHECKING:
    import argparse

    from lockstep.operator import TrainingOperator
    from lockstep.trainer import Callback


_COUNTS: Final = ("epoch", "num_samples", "batch_count")


def run(read: argparse.Namespace) -> int:
    """Train, or check one step. Returns the exit code; the user's own exceptions pass through."""
    try:
        operator = import_operator(read.operator)
        config = load_config(read.config, read.settings, read.batch_size)
        callbacks = [_make_logger(path, read.log_every) for path in read.log]
        if read.save is not None:
            _check_save_path(Path(read.save), in_directory=getattr(read, "sync", None) == "fsdp")
    except (ConfigurationError, NotAvailableError) as error:
        print(with_cli_options(error), file=sys.stderr)
        return USAGE
    try:
        return (_dry_run if read.dry_run else _train)(read, operator, config, callbacks)
    except _WrongOptionError as wrong:
        print(with_cli_options(wrong.reason), file=sys.stderr)
        return USAGE
    except LockstepError as error:
        print(with_cli_options(error), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


class _WrongOptionError(Exception):
    """The trainer refuses an option, before `setup` runs."""

    def __init__(self, reason: LockstepError) -> None:
        super().__init__(reason)
        self.reason = reason


def _check_save_path(path: Path, *, in_directory: bool) -> None:
    """Refuse a path for --save that cannot be written, before training has begun.

    Raises:
        ConfigurationError: the path cannot be written.
    """
    try:
        problem = _why_not_writable(path, in_directory=in_directory)
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise ConfigurationError("--save names no file to write", where=str(path), got=problem)


def _why_not_writable(path: Path, *, in_directory: bool) -> str | None:
    if path.is_dir() and not in_directory:
        return "a directory; name a file in it"
    place = path.absolute()
    found = next((each for each in place.parents if each.exists()), place)
    if not found.is_dir():
        return f"{found} is a file, and no directory"
    return None if os.access(found, os.W_OK) else f"{found} is not writable"


def _make_logger(path: str, every: int | None) -> Callback:
    from lockstep.integrations import loggers

    if path.endswith(".csv"):
        return loggers.CSVLogger(path, every=every)
    if path.endswith(".jsonl"):
        return loggers.JSONLinesLogger(path, every=every)
    return loggers.TensorBoardLogger(path, every=every)


def _make_trainer(
    operator: type[TrainingOperator], config: dict[str, Any], arguments: dict[str, Any]
) -> TorchTrainer:
    try:
        return TorchTrainer(
            training_operator_cls=operator, config=config, use_tqdm=True, **arguments
        )
    except KeyError as error:
        note_missing_key(error, operator, config)
        raise
    except LockstepError as error:
        if code_of(error) == USAGE:
            raise _WrongOptionError(error) from error
        raise


def _trainer_arguments(read: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(read).items() if name in TRAINER_OPTIONS}


def _train(
    read: argparse.Namespace,
    operator: type[TrainingOperator],
    config: dict[str, Any],
    callbacks: list[Callback],
) -> int:
    arguments = {**_trainer_arguments(read), "callbacks": callbacks}
    with _make_trainer(operator, config, arguments) as trainer:
        # What earlier programs finished; an unfinished epoch goes on.
        done = trainer.status()["epochs_finished"] if "resume" in read else 0
        epochs = range(done, read.epochs)
        if not epochs:
            print(f"the run has its {read.epochs} epochs already")
        missing: int | None = None  # the step of a checkpoint behind which none was written
        for _ in epochs:
            trained, is_written = _train_epoch(trainer)
            newest = 0 if trainer._disk.writer is None else trainer._disk.writer.latest_step
            if not is_written:
                missing = newest
            elif missing is not None and newest > missing:
                missing = None
            _validate_and_print(trainer, trained)
            if trainer.should_stop:
                break
        if read.save is not None:
            print(f"saved {trainer.save(read.save)}")
    return 0 if missing is None else FAILED  # a next program would go on from an older step


def _train_epoch(trainer: TorchTrainer) -> tuple[dict[str, Any], bool]:
    """The metrics of an epoch, and whether its checkpoints could be written.

    The run goes on without: a disk that is full now may have room at the next checkpoint.
    """
    try:
        return trainer.train(), True
    except CheckpointWriteError as error:
        if error.result is None:
            raise
        print(with_cli_options(error), file=sys.stderr)
        return error.result, False


def _validate_and_print(trainer: TorchTrainer, trained: dict[str, Any]) -> None:
    validated = trainer.validate() if trainer._workers.has_loader("validation") else {}
    metrics = {**trained, **{key: validated[key] for key in validated if key not in _COUNTS}}
    numbers = [
        f"{name} {value:.4g}"
        for name, value in metrics.items()
        if name not in _COUNTS and not name.startswith("last_") and isinstance(value, int | float)
    ]
    print(
        f"epoch {trained['epoch']:3}  {trained['num_samples']} samples"
        f" in {trained['batch_count']} steps  {'  '.join(numbers)}",
        flush=True,
    )


def _dry_run(
    read: argparse.Namespace,
    operator: type[TrainingOperator],
    config: dict[str, Any],
    callbacks: list[Callback],
) -> int:
    """Print the plan of the run, and compare the gradients of one step with one process."""
    given = _trainer_arguments(read)
    arguments = {name: value for name, value in given.items() if name not in SAVING_OPTIONS}
    with _make_trainer(operator, config, arguments) as trainer:
        _print_field("operator", f"{operator.__module__}:{operator.__name__}")
        _print_field(
            "config", "  ".join(f"{key}={value!r}" for key, value in config.items()) or "empty"
        )
        _print_field("epochs", read.epochs)
        _print_plan(trainer)
        for name in SAVING_OPTIONS:
            if name in given:
                _print_field(name.replace("_", " "), given[name])
        print("\none step on a copy, with all workers and in one process:")
        report = trainer.verify()
        print(report)
        print("nothing was trained or saved")
    return 0 if report.ok else FAILED  # None, an inconclusive report, is a failure as well


def _print_plan(trainer: TorchTrainer) -> None:
    started = trainer._workers.start_reports
    for purpose, steps in started[0].steps_per_epoch.items():
        _print_field(purpose, f"{'unknown' if steps is None else steps} steps an epoch")
    hosts = trainer.apply_all_workers(socket.gethostname)
    shards = trainer.apply_all_operators(_describe_shards)
    for rank, (worker, host, own) in enumerate(zip(started, hosts, shards, strict=True)):
        _print_field(f"rank {rank}", f"{host}, process {worker.pid}, {worker.device}, {own}")


def _print_field(name: str, value: Any) -> None:
    print(f"{name:<17} {value}")


def _describe_shards(operator: TrainingOperator) -> str:
    assignment = operator._lockstep.context.shard_assignment
    own = ", ".join(map(str, assignment.shards))
    return f"shard {own} of {assignment.num_shards}"
