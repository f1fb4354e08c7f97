# SPDX-License-Identifier: Apache-2.0
"""The site's contents: what index.md and the folders' README.md link to, in that order.

The lists that a reader of the Markdown follows are the only ones; nobody keeps a second one for
the site. Pages outside of this folder that belong to the site (the changelog) are included by
pages of their own here, and links go to those.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sphinx.application import Sphinx

PAGE = re.compile(r"\]\((?P<path>[\w./-]+)\.md(?:#[\w-]*)?\)")
INCLUDED = {"CHANGELOG": "changelog", "CONTRIBUTING": "contributing", "README": "index"}
"""Pages at the repository's root, by their names here."""


def linked(text: str) -> list[str]:
    """The pages of this folder and below that `text` links to, once each."""
    found = dict.fromkeys(match["path"] for match in PAGE.finditer(text))
    return [path for path in found if not path.startswith("..")]


def contents(pages: Iterable[str], caption: str = "") -> str:
    """A list of pages that shows in the margin, and not on the page."""
    lines = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), ""]
    return "\n".join(["", "", *lines, *pages, "```", ""])


def of_the_site(text: str, pages: set[str]) -> str:
    """Contents for the front page: a list for each of its sections."""
    sections = [part.split("\n", 1) for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    listed = {heading: linked(body) for heading, body in sections}
    known = set(chain.from_iterable(listed.values())) | {"index"}
    # A page that was forgotten is found at the end, and not lost.
    forgotten = sorted(page for page in pages if "/" not in page and page not in known)
    listed[next(reversed(listed))] += forgotten
    return "".join(contents(paths, heading) for heading, paths in listed.items())


def of_a_folder(text: str, folder: str, pages: set[str]) -> str:
    """Contents for a folder's README: the pages beside it."""
    beside = {PurePosixPath(page).name for page in pages if page.startswith(f"{folder}/")}
    paths = [path for path in linked(text) if path in beside]
    return contents([*paths, *sorted(beside - {*paths, "README"})])


def inside(text: str, docname: str) -> str:
    """The same, with links to included pages leading to them."""
    depth = docname.count("/") + 1
    for name, here in INCLUDED.items():
        text = text.replace(f"]({'../' * depth}{name}.md", f"](/{here}.md")
    return text


def add_contents(app: Sphinx, docname: str, content: list[str]) -> None:
    text = inside(content[0], docname)
    if docname == "index":
        text += of_the_site(text, app.env.found_docs)
    elif Path(docname).name == "README":
        text += of_a_folder(text, str(Path(docname).parent), app.env.found_docs)
    content[0] = text


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", add_contents)
    return {"parallel_read_safe": True}
