# SPDX-License-Identifier: Apache-2.0
"""A report as one file of HTML: without network, light and dark, wide and narrow."""

from pathlib import Path


def document(title: str, body: str) -> str:
    """The whole page; `title` and `body` are HTML."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>\n{style}</style></head><body>"
        f"<h1>{title}</h1>{body}</body></html>\n"
    )
