# SPDX-License-Identifier: Apache-2.0
"""The sections of our docstrings as fields of reStructuredText.

Rejected: Sphinx's own reader of Google's style (napoleon). It takes what precedes a colon for a
type, under `Returns` and in one-line docstrings of attributes, where ours is a part of the
sentence (types stand in annotations); it knows no sentences among the names under `Raises`, and no
`Gradient` and `Collective`.
"""

from __future__ import annotations

import re
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from lockstep import errors

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SECTION = re.compile(r"(?P<name>Args|Attributes|Returns|Gradient|Collective|Raises):$")
ENTRY = re.compile(r"(?P<name>\w+(?:, \w+)*): (?P<text>.*)", re.DOTALL)
EXCEPTION = re.compile(r"(?<![`\w])[A-Z]\w*Error\b")


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


def parameters(body: list[str]) -> list[str]:
    """A field for each name."""
    fields: list[str] = []
    for each in entries(body):
        entry = ENTRY.fullmatch(each)
        if entry is None:
            raise ValueError(f"no argument, and what it is: {each}")
        fields += [f":param {name}: {entry['text']}" for name in entry["name"].split(", ")]
    return fields


def field(name: str, body: list[str]) -> list[str]:
    """One section as a field, or as several."""
    if name == "Args":
        return [*parameters(body), ""]
    if name in ("Raises", "Attributes"):
        change = with_links if name == "Raises" else with_name
        parts = [change(each) for each in entries(body)]
        body = [f"* {each}" for each in parts] if len(parts) > 1 else parts
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
        result += field(section["name"], dedent("\n".join(body)).strip("\n").split("\n"))
    return result


def rewrite(
    app: Sphinx, what: str, name: str, subject: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = convert(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", rewrite)
    return {"parallel_read_safe": True}
