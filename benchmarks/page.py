# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks page`: put the latest results into docs/benchmark.md.

The page's words are written by hand; between its marks stands what the runs left in out/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmark.md"
RESULTS = ROOT / "out" / "benchmarks"
MARK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 where a part of the page has no results yet; the others are put in."""
    missing: list[str] = []

    def filled(found: re.Match[str]) -> str:
        results = RESULTS / found[2] / "results.md"
        if not results.is_file():
            missing.append(found[2])
            return found[0]
        return f"{found[1]}\n{results.read_text().strip()}\n\n{found[3]}"

    PAGE.write_text(MARK.sub(filled, PAGE.read_text()))
    for name in missing:
        print(f"no results of {name!r} in {RESULTS.relative_to(ROOT)}: that part stays as it is")
    return 1 if missing else 0
