# SPDX-License-Identifier: Apache-2.0
"""``python -m lockstep.audit``: a rank, under any launcher; without one, the launcher."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.audit.options import Options


def main() -> int:
    """A rank if somebody has said which one, else N ranks."""
    options = _options()
    if not _is_rank():
        from lockstep.audit.launch import launch

        return launch(options)
    from lockstep.audit.exit_codes import USAGE
    from lockstep.audit.options import problem_with
    from lockstep.audit.rank import Rank

    rank = Rank(options)
    rank.begin_report()
    problem = problem_with(options)
    if problem is not None:
        print(f"lockstep audit: {problem}", file=sys.stderr)
        return USAGE
    return rank.run()


def _is_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _options() -> Options:
    """What the command line asks for; leaves with 2 and a sentence if it is wrong."""
    from lockstep.audit.options import add_arguments, from_namespace
    from lockstep.audit.wrong_usage import files_also_of_wrong_usage

    parser = argparse.ArgumentParser(
        prog="python -m lockstep.audit",
        description="Run a training script on several ranks and name what is silently wrong.",
    )
    add_arguments(parser)
    with files_also_of_wrong_usage(sys.argv[1:]):
        # A rank that fails may restart a whole job of somebody else's launcher.
        return from_namespace(parser.parse_args(), "never" if _is_rank() else "error")


if __name__ == "__main__":
    # Not a `sys.exit` in a function: the interpreter ends as after any script, atexit included.
    sys.exit(main())
