# SPDX-License-Identifier: Apache-2.0
"""``lockstep train``, ``replay``, ``bisect``, ``audit``, ``explain`` and ``completion``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


DESCRIPTION = "Train a model with several workers, and find what is silently wrong in any script."


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line; imports no torch."""
    from lockstep.audit.options import add_arguments as add_audit
    from lockstep.cli.bisect_options import add_arguments as add_bisect
    from lockstep.cli.completion import SHELLS
    from lockstep.cli.replay_options import add_arguments as add_replay
    from lockstep.cli.train_options import add_arguments as add_train
    from lockstep.installed_versions import PrintVersions

    parser = argparse.ArgumentParser(prog="lockstep", description=DESCRIPTION)
    parser.add_argument(
        "--version", action=PrintVersions, nargs=0, help="print the versions and leave"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train an operator with several workers",
        description="Train an operator with several workers, on this machine or on a Ray cluster.",
    )
    add_train(train)
    replay = commands.add_parser(
        "replay",
        help="compute a step of a run again, and compare it with the run's log",
        description="Compute a step of a run again in one process, and compare it with the run's"
        " log. Exit code: 0 for the same bits, 65 if something differs.",
    )
    add_replay(replay)
    bisect = commands.add_parser(
        "bisect",
        help="find the first step in which two runs differ, and by what",
        description="Find the first step in which two runs differ, and by what. Exit code: 0 if"
        " they are alike, 65 if they differ.",
    )
    add_bisect(bisect)
    audit = commands.add_parser(
        "audit",
        help="run a training script on several ranks and name what is silently wrong",
        description="Run a training script on several ranks and name what is silently wrong.",
    )
    add_audit(audit)
    explain = commands.add_parser("explain", help="print what a code means and what to do")
    explain.add_argument("code", metavar="CODE", nargs="?", help="e.g. LS101; all codes without")
    completion = commands.add_parser("completion", help="print a completion script for a shell")
    completion.add_argument("shell", choices=SHELLS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code."""
    from lockstep.audit.options import from_namespace
    from lockstep.audit.wrong_usage import files_also_of_wrong_usage

    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    with files_also_of_wrong_usage(words[1:] if words[:1] == ["audit"] else []):
        read = parser.parse_args(words)
    if read.command == "train":
        from lockstep.cli.train_command import run

        return run(read)
    if read.command == "replay":
        from lockstep.cli.replay_command import run as run_replay

        return run_replay(read)
    if read.command == "bisect":
        from lockstep.cli.bisect_command import run as run_bisect

        return run_bisect(read)
    if read.command == "completion":
        from lockstep.cli.completion import print_script

        return print_script(parser, read.shell)
    if read.command == "explain":
        from lockstep.audit.explain import explain as explain_code

        return explain_code(read.code)
    from lockstep.audit.launch import launch

    return launch(from_namespace(read))
