# SPDX-License-Identifier: Apache-2.0
"""Keep what pages show of programs the same as the programs: their source and their output.

    python docs/refresh.py                        rewrite the blocks of all pages
    python docs/refresh.py --check docs/x.md      say what has changed, and fail if anything has

A block in a page follows one of these lines, with paths relative to the page:

    <!-- source: program.py name other_name -->    functions and classes, as they stand there
    <!-- run: program.py -->                       what the program prints
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?P<head><!-- (?P<kind>source|run): (?P<program>\S+)(?P<names>[ \w]*) -->\n```\w+\n)"
    r"(?P<body>.*?)(?P<tail>^```$)",
    re.DOTALL | re.MULTILINE,
)


def source(program: Path, names: list[str]) -> str:
    """The named definitions of a program, one after the other."""
    text = program.read_text(encoding="utf-8")
    found = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    lines = text.splitlines()
    parts = []
    for name in names:
        node = found[name]
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(parts) + "\n"


def output(program: Path) -> str:
    """What a program prints on a CPU, when it is started from the repository's root."""
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{program} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.rstrip() + "\n"


def refreshed(page: Path, run: Callable[[Path], str] | None) -> str:
    """The page with its blocks as they should be; without `run`, output stays as it is."""

    def block(match: re.Match[str]) -> str:
        program = page.parent / match["program"]
        body = match["body"]
        if match["kind"] == "source":
            body = source(program, match["names"].split())
        elif run is not None:
            body = run(program)
        return match["head"] + body + match["tail"]

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if anything is old"
    )
    parser.add_argument("--without-running", action="store_true", help="look at the source only")
    parser.add_argument("pages", type=Path, nargs="*", help="all pages in docs by default")
    arguments = parser.parse_args()
    stale = False
    for page in arguments.pages or sorted((ROOT / "docs").rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = refreshed(page, None if arguments.without_running else output)
        if after == before:
            continue
        stale = True
        lines = (before.splitlines(True), after.splitlines(True))
        sys.stdout.writelines(difflib.unified_diff(*lines, str(page), f"{page}, refreshed"))
        if not arguments.check:
            page.write_text(after, encoding="utf-8")
    if arguments.check and stale:
        raise SystemExit("run `make docs-refresh` and look at what changed")


if __name__ == "__main__":
    main()
