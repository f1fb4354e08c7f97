# SPDX-License-Identifier: Apache-2.0
"""``lockstep train``: trains an operator for some epochs, or tries a step out (``--dry-run``)."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.cli.error_text import shown
from lockstep.cli.operator_config import config_of
from lockstep.cli.operator_import import find_operator
from lockstep.cli.train_options import SAVING, TRAINER
from lockstep.errors import ConfigurationError, LockstepError, NotAvailableError
from lockstep.keys import BATCH_SIZE
from lockstep.trainer import TorchTrainer

if TYPE_CHECKING:
    import argparse

    from lockstep.operator import TrainingOperator
    from lockstep.trainer import Callback

USAGE: Final = 2
FAILED: Final = 1
INTERRUPTED: Final = 130

_COUNTS: Final = ("epoch", "num_samples", "batch_count")


def run(read: argparse.Namespace) -> int:
    """Train, or try out. Returns the exit code; the user's own exceptions pass."""
    try:
        operator = find_operator(read.operator)
        config = config_of(read.config, read.settings, read.batch_size)
        callbacks = [_logger(path, read.log_every) for path in read.log]
        if read.save is not None:
            _check_target(Path(read.save), in_directory=getattr(read, "sync", None) == "fsdp")
    except (ConfigurationError, NotAvailableError) as error:
        print(shown(error), file=sys.stderr)
        return USAGE
    try:
        return (_try_out if read.dry_run else _train)(read, operator, config, callbacks)
    except LockstepError as error:
        print(shown(error), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _check_target(path: Path, *, in_directory: bool) -> None:
    """Refuse a path for --save that cannot be written: before training, and not after it.

    Raises:
        ConfigurationError: the path cannot be written.
    """
    try:
        problem = _problem_with(path, in_directory=in_directory)
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise ConfigurationError("--save names no file to write", where=str(path), got=problem)


def _problem_with(path: Path, *, in_directory: bool) -> str | None:
    found = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir() and not in_directory:
        return "a directory; name a file in it"
    if not found.is_dir():
        return f"{found} is a file, and no directory"
    return None if os.access(found, os.W_OK) else f"{found} is not writable"


def _logger(path: str, every: int | None) -> Callback:
    from lockstep.integrations import loggers

    if path.endswith(".csv"):
        return loggers.CSVLogger(path, every=every)
    if path.endswith(".jsonl"):
        return loggers.JSONLinesLogger(path, every=every)
    return loggers.TensorBoardLogger(path, every=every)


def _opened(
    operator: type[TrainingOperator], config: dict[str, Any], arguments: dict[str, Any]
) -> TorchTrainer:
    try:
        return TorchTrainer(
            training_operator_cls=operator, config=config, use_tqdm=True, **arguments
        )
    except KeyError as error:
        if error.args and error.args[0] not in config:
            key = error.args[0]
            given = "--batch-size 64" if key == BATCH_SIZE else f"--set {key}=..."
            error.add_note(f"the config has no {key!r}: {given}, or --config FILE")
        raise


def _given(read: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(read).items() if name in TRAINER}


def _train(
    read: argparse.Namespace,
    operator: type[TrainingOperator],
    config: dict[str, Any],
    callbacks: list[Callback],
) -> int:
    arguments = {**_given(read), "callbacks": callbacks}
    with _opened(operator, config, arguments) as trainer:
        epochs = range(_epochs_done(trainer) if "resume" in read else 0, read.epochs)
        if not epochs:
            print(f"the run has its {read.epochs} epochs already")
        for _ in epochs:
            _print_epoch(trainer)
            if trainer.should_stop:
                break
        if read.save is not None:
            print(f"saved {trainer.save(read.save)}")
    return 0


def _epochs_done(trainer: TorchTrainer) -> int:
    """Whole epochs that earlier programs trained; this program finishes one that they began."""
    place = trainer.state_dict()["position"].get("train", {"epoch": 0})
    done: int = place["epoch"]
    return done


def _print_epoch(trainer: TorchTrainer) -> None:
    trained = trainer.train()
    validated = trainer.validate() if trainer._pool.has_loader("validation") else {}
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


def _try_out(
    read: argparse.Namespace,
    operator: type[TrainingOperator],
    config: dict[str, Any],
    callbacks: list[Callback],
) -> int:
    """Print what would run where, and compare the gradients of one step with one process's."""
    given = _given(read)
    arguments = {name: value for name, value in given.items() if name not in SAVING}
    with _opened(operator, config, arguments) as trainer:
        _say("operator", f"{operator.__module__}:{operator.__name__}")
        _say("config", "  ".join(f"{key}={value!r}" for key, value in config.items()) or "empty")
        _say("epochs", read.epochs)
        _print_plan(trainer)
        for name in SAVING:
            if name in given:
                _say(name.replace("_", " "), given[name])
        print("\none step on a copy, with all workers and in one process:")
        report = trainer.verify()
        print(report)
        print("nothing was trained or saved")
    return 0 if report.ok else FAILED  # inconclusive is not right


def _print_plan(trainer: TorchTrainer) -> None:
    started = trainer._pool.start_reports
    for purpose, steps in started[0].steps_per_epoch.items():
        _say(purpose, f"{'unknown' if steps is None else steps} steps an epoch")
    hosts = trainer.apply_all_workers(socket.gethostname)
    shards = trainer.apply_all_operators(_shards)
    for rank, (worker, host, own) in enumerate(zip(started, hosts, shards, strict=True)):
        _say(f"rank {rank}", f"{host}, process {worker.pid}, {worker.device}, {own}")


def _say(name: str, value: Any) -> None:
    print(f"{name:<17} {value}")


def _shards(operator: TrainingOperator) -> str:
    placement = operator._lockstep.context.placement
    own = ", ".join(map(str, placement.shards))
    return f"shard {own} of {placement.num_shards}"
