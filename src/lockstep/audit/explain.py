# SPDX-License-Identifier: Apache-2.0
"""``lockstep explain CODE``: the rule's page, the same as in the documentation."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.audit.options import USAGE
from lockstep.audit.rules import all_codes

_PACKAGED = Path(__file__).parent / "pages"
_IN_REPOSITORY = Path(__file__).resolve().parents[3] / "docs" / "rules"


def page_of(code: str) -> str | None:
    """The page of a code, as Markdown; None if there is no such code."""
    for folder in (_PACKAGED, _IN_REPOSITORY):
        path = folder / f"{code.upper()}.md"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def explain(code: str | None) -> int:
    """Print one page, or the list of codes."""
    known = all_codes()
    if code is None:
        for name, entry in sorted(known.items()):
            print(f"{name}  {entry.severity:<8} {entry.name}")
        return 0
    page = page_of(code) if code.isalnum() else None
    if page is None:
        listed = ", ".join(sorted(known))
        print(f"lockstep explain: there is no code {code!r}; there are {listed}", file=sys.stderr)
        return USAGE
    print(page, end="")
    return 0
