# SPDX-License-Identifier: Apache-2.0
"""The options of ``lockstep replay``. Imports no torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lockstep.audit.options import positive
from lockstep.cli.train_options import add_config_options

if TYPE_CHECKING:
    from argparse import ArgumentParser


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's checkpoint_dir")
    parser.add_argument(
        "--step", type=positive, required=True, metavar="K", help="global batches from the start"
    )
    parser.add_argument("--workers", type=positive, default=1, metavar="N")
    parser.add_argument(
        "--shard", type=int, metavar="S", help="compare, and stop in, this shard alone"
    )
    parser.add_argument("--pdb", action="store_true", help="stop in compute_loss at that step")
    parser.add_argument(
        "--breakpoint", type=_place, metavar="FILE:LINE", help="stop there at that step"
    )
    parser.add_argument(
        "--around",
        type=positive,
        metavar="N",
        help="print losses, gradients by layer and samples of N steps before and after it",
    )
    parser.add_argument("--html", metavar="FILE", help="write these as a page; N is 3 by default")
    parser.add_argument(
        "--operator", metavar="MODULE:OPERATOR", help="instead of the one that the log names"
    )
    add_config_options(parser)


def _place(text: str) -> tuple[str, int]:
    file, _, line = text.rpartition(":")
    if not file or not line.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not FILE:LINE")
    return file, int(line)
