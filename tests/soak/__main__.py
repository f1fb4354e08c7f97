# SPDX-License-Identifier: Apache-2.0
"""Random training programs on N ranks beside one process: ``make soak SECONDS=600``."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from soak import refusals
from soak.spec import Spec
from soak.tally import Soak


def main() -> int:
    """Returns 1 if a program failed."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=None, help="end after so long")
    parser.add_argument("--count", type=int, default=None, help="end after so many programs")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    parser.add_argument("--sync", default=None, help="only this way to synchronise")
    parser.add_argument("--workers", type=int, default=None, help="only so many ranks")
    parser.add_argument("--processes", type=int, default=2, help="that run programs")
    parser.add_argument("--program", default=None, help="run SEED:NUMBER, or a file with a spec")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="where scripts go")
    parser.add_argument("--trainer", type=float, default=None, help="share of trainer's programs")
    parser.add_argument("--ray", type=float, default=None, help="share of the time on real Ray")
    parser.add_argument("--clearing", default=None, help="on Ray: only this way to clear gradients")
    parser.add_argument("--no-shrink", action="store_true", help="count failures only")
    parser.add_argument("--first", action="store_true", help="end with the first failure")
    parser.add_argument("--page", action="store_true", help="print the table of refusals")
    options = parser.parse_args()
    if options.page:
        print(refusals.page())
        return 0
    fixed = {"sync": options.sync, "workers": options.workers}
    fixed |= {} if options.trainer is None else {"trainer": options.trainer}
    fixed |= {} if options.clearing is None else {"clearing": options.clearing}
    is_long = options.count is None and (options.seconds is None or options.seconds >= 120)
    share = options.ray if options.ray is not None else 0.15 * is_long
    soak = Soak(fixed, options.out, shrinks=not options.no_shrink, on_ray=share)
    soak.ends_with_first = options.first
    if options.program:
        path = Path(options.program)
        spec = Spec.from_json(path.read_text()) if path.exists() else None
        return soak.alone(options.program, spec)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    seconds = 600.0 if options.seconds is None and options.count is None else options.seconds
    print(f"seed {seed}", flush=True)
    return soak.run(seed, seconds, options.count, options.processes)


if __name__ == "__main__":
    sys.exit(main())
