# SPDX-License-Identifier: Apache-2.0
"""The sections of our docstrings that Sphinx's own reader of them would misread.

Types stand in annotations, so what precedes a colon under `Returns` is part of a sentence and no
type; `Raises` may hold sentences between its names; `Gradient` and `Collective` are ours. Each
becomes a field, beside the parameters, which napoleon makes.
"""

from __future__ import annotations

import re
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from lockstep import errors

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SECTION = re.compile(r"(?P<name>Returns|Raises|Gradient|Collective|Attributes):$")
ENTRY = re.compile(r"(?P<name>\w+(?:, \w+)*): (?P<text>.*)", re.DOTALL)
EXCEPTION = re.compile(r"(?<![`\w])[A-Z]\w*Error\b")

BEFORE_NAPOLEON = 400


def indented(lines: list[str], by: int = 4) -> list[str]:
    return [" " * by + line if line else "" for line in lines]


def entries(lines: list[str]) -> list[str]:
    """The parts of a section's body: each begins with a name, or with a sentence of its own."""
    found: list[str] = []
    for line in lines:
        begins = not line.startswith(" ") and (
            not found
            or ENTRY.match(line)
            or (found[-1].rstrip().endswith(".") and line[:1].isupper())
        )
        if begins:
            found.append(line)
        else:
            found[-1] += f" {line.strip()}"
    return found


def with_links(text: str) -> str:
    """Our exceptions become links, the others code."""

    def link(match: re.Match[str]) -> str:
        name = match[0]
        return f":py:exc:`~lockstep.errors.{name}`" if hasattr(errors, name) else f"``{name}``"

    return EXCEPTION.sub(link, text)


def with_name(text: str) -> str:
    """The name of an attribute as code, before what it is."""
    entry = ENTRY.match(text)
    return f"``{entry['name']}``: {entry['text']}" if entry else text


def field(name: str, body: list[str]) -> list[str]:
    """One section as a field."""
    if name in ("Raises", "Attributes"):
        rendered = [with_links(each) if name == "Raises" else with_name(each) for each in body]
        body = [f"* {each}" for each in rendered] if len(rendered) > 1 else rendered
    return [f":{name}:", *indented(body), ""]


def convert(lines: list[str]) -> list[str]:
    """A docstring with those sections as fields; everything else as it is."""
    result: list[str] = []
    rest = list(lines)
    while rest:
        line = rest.pop(0)
        section = SECTION.match(line)
        if section is None:
            result.append(line)
            continue
        body: list[str] = []
        while rest and (not rest[0] or rest[0].startswith(" ")):
            body.append(rest.pop(0))
        body = dedent("\n".join(body)).strip("\n").split("\n")
        name = section["name"]
        result += field(name, entries(body) if name in ("Raises", "Attributes") else body)
    return result


def rewrite(
    app: Sphinx, what: str, name: str, subject: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = convert(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", rewrite, priority=BEFORE_NAPOLEON)
    return {"parallel_read_safe": True}
