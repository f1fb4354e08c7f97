# SPDX-License-Identifier: Apache-2.0
"""``lockstep bisect``: finds the first step in which two runs differ, and by what."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from lockstep.cli.exit_codes import DIFFERS, FAILED, USAGE
from lockstep.cli.fix_hints import with_cli_options
from lockstep.cli.logged_operator import import_logged_hook, import_logged_operator
from lockstep.cli.operator_config import load_config
from lockstep.errors import LockstepError
from lockstep.trainer import TorchTrainer
from lockstep.trainer.logged_run import LoggedRun
from lockstep.trainer.run_bisection import CapturedRun, ComparedRun, bisect_runs, capture_run
from lockstep.trainer.step_replay import trainer_maker

if TYPE_CHECKING:
    import argparse


def run(read: argparse.Namespace) -> int:
    """Compare. Returns the exit code; the user's own exceptions pass through."""
    try:
        config = load_config(read.config, read.settings)
        runs = [
            ComparedRun(folder, partial(_capture_in_own_process, folder, read.operator, config))
            for folder in (read.run_a, read.run_b)
        ]
        report = bisect_runs(*runs)
    except LockstepError as error:
        print(with_cli_options(error), file=sys.stderr)
        return USAGE
    print(report)
    if report.step is not None:
        return DIFFERS
    # Nothing is green that was not looked at.
    return 0 if report.num_compared else FAILED


def _capture_in_own_process(
    folder: str, operator: str | None, config: dict[str, Any], steps: range
) -> CapturedRun:
    """Compute the steps in another process: the programs of the runs may have one name."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_capture, folder, operator, config, steps).result()


def _capture(
    folder: str, operator: str | None, config: dict[str, Any], steps: range
) -> CapturedRun:
    program = LoggedRun.read(folder).program_of(steps[-1])
    operator_cls = import_logged_operator(program, folder, operator)
    make_trainer = trainer_maker(TorchTrainer, operator_cls, import_logged_hook(program))
    return capture_run(make_trainer, folder, config, steps)
