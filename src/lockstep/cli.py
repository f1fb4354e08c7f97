# SPDX-License-Identifier: Apache-2.0
"""``lockstep audit`` and ``lockstep explain``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code."""
    from lockstep.audit.options import add_arguments

    parser = argparse.ArgumentParser(prog="lockstep", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    audit = commands.add_parser(
        "audit",
        help="run a training script on several ranks and name what is silently wrong",
        description="Run a training script on several ranks and name what is silently wrong.",
    )
    add_arguments(audit)
    explain = commands.add_parser("explain", help="print what a code means and what to do")
    explain.add_argument("code", metavar="CODE", nargs="?", help="e.g. LS101; all codes without")
    read = parser.parse_args(arguments)
    if read.command == "explain":
        from lockstep.audit.explain import explain as explain_code

        return explain_code(read.code)
    from lockstep.audit.launch import launch
    from lockstep.audit.options import from_namespace

    return launch(from_namespace(read))


if __name__ == "__main__":
    sys.exit(main())
