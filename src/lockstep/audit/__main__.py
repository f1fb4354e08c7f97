# SPDX-License-Identifier: Apache-2.0
"""``python -m lockstep.audit``: a rank, under any launcher; without one, the launcher."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """A rank if somebody has said which one, else N ranks."""
    from lockstep.audit.options import parse

    options = parse(None, "python -m lockstep.audit")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        from lockstep.audit.launch import launch

        return launch(options)
    from lockstep.audit.options import USAGE, problem_with
    from lockstep.audit.rank import Rank

    rank = Rank(options)
    rank.begin_report()
    problem = problem_with(options)
    if problem is not None:
        print(f"lockstep audit: {problem}", file=sys.stderr)
        return USAGE
    return rank.run()


if __name__ == "__main__":
    # Not a `sys.exit` in a function: the interpreter ends as after any script, atexit included.
    sys.exit(main())
