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
PICTURE = ROOT / "docs" / "benchmark.svg"
SHOWN = f"![ours / theirs, each row]({PICTURE.name})\n\n"
MARK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 where a part of the page has no results yet; the others are put in."""
    text, missing = filled(PAGE.read_text(), RESULTS)
    PAGE.write_text(text)
    for name in missing:
        print(f"no results of {name!r} in {RESULTS.relative_to(ROOT)}: that part stays as it is")
    return 1 if missing else 0


def filled(text: str, results: Path) -> tuple[str, list[str]]:
    """The page with the results that there are, and the names of the parts without any."""
    missing: list[str] = []

    def part(found: re.Match[str]) -> str:
        table = results / found[2] / "results.md"
        if not table.is_file():
            missing.append(found[2])
            return found[0]
        picture = SHOWN if found[2] == "bench" and PICTURE.is_file() else ""
        return f"{found[1]}\n{picture}{table.read_text().strip()}\n\n{found[3]}"

    return MARK.sub(part, text), missing
