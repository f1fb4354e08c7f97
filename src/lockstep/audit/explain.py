# SPDX-License-Identifier: Apache-2.0
"""``lockstep explain CODE``: the rule's page, the same as in the documentation.

What is raised as an error and found by no rule has a code too; what is known of that is said there,
in its class.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from lockstep import errors
from lockstep.audit.exit_codes import USAGE
from lockstep.audit.rules import all_codes

_PACKAGED = Path(__file__).parent / "pages"
_IN_REPOSITORY = Path(__file__).resolve().parents[3] / "docs" / "rules"


def page_of(code: str) -> str | None:
    """The page of a code, as Markdown; None if there is no such code.

    Where a rule and an error have a code in common, they mean the same: the rule's page.
    """
    for folder in (_PACKAGED, _IN_REPOSITORY):
        path = folder / f"{code.upper()}.md"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raised = raised_codes().get(code.upper())
    return None if raised is None else _page_of_class(code.upper(), raised)


def raised_codes() -> dict[str, type[Exception]]:
    """The errors and warnings that have a code, by it."""
    # Its own and no inherited one: a code belongs to the class that introduces it.
    return {
        vars(kind)["code"]: kind
        for kind in vars(errors).values()
        if inspect.isclass(kind)
        and issubclass(kind, Exception)
        and "code" in vars(kind)
        and kind is not errors.LockstepError
    }


def _page_of_class(code: str, raised: type[Exception]) -> str:
    builtin = next(kind for kind in raised.__mro__ if kind.__module__ == "builtins")
    return (
        f"# {code}: {raised.__name__}\n\n"
        f"`lockstep.errors.{raised.__name__}`, {_a(builtin.__name__)}.\n\n"
        f"{inspect.getdoc(raised)}\n\n"
        "Its message says where, what was expected and what was there, the likely cause, and what"
        " to type.\n"
    )


def _a(name: str) -> str:
    return f"an `{name}`" if name[0] in "AEIO" else f"a `{name}`"


def explain(code: str | None) -> int:
    """Print one page, or the list of codes."""
    known, raised = all_codes(), raised_codes()
    if code is None:
        listed = {name: f"{'raised':<8} {kind.__name__}" for name, kind in raised.items()}
        listed |= {name: f"{entry.severity:<8} {entry.name}" for name, entry in known.items()}
        for name, text in sorted(listed.items()):
            print(f"{name}  {text}")
        return 0
    page = page_of(code) if code.isalnum() else None
    if page is None:
        names = ", ".join(sorted({*known, *raised}))
        print(f"lockstep explain: there is no code {code!r}; there are {names}", file=sys.stderr)
        return USAGE
    print(page, end="")
    return 0
