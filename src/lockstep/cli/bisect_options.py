# SPDX-License-Identifier: Apache-2.0
"""The options of ``lockstep bisect``. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.cli.train_options import add_config_options

if TYPE_CHECKING:
    from argparse import ArgumentParser


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_a", metavar="RUN_A", help="the checkpoint_dir of one run")
    parser.add_argument("run_b", metavar="RUN_B", help="that of the other")
    parser.add_argument(
        "--operator",
        metavar="MODULE:OPERATOR",
        help="of both runs, instead of those that the logs name",
    )
    add_config_options(parser)
