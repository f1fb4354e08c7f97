# SPDX-License-Identifier: Apache-2.0
"""The pages as a site: `make docs` writes it to build/docs, with every warning an error.

The pages are plain Markdown with relative links, so that they read well without a site too.
What only a site needs (contents, the reference) is made here and in `site/`.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "site"))

project = "lockstep"
author = "the lockstep contributors"
version = release = version_of("lockstep-train")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "contents",
    "docstrings",
]
root_doc = "index"
# Dashes only: quoted values are there to be typed.
smartquotes_action = "D"

# ------------------------------------------------------------------------------------- pages

myst_enable_extensions = ["colon_fence"]
# The anchors that GitHub gives to headings, so that `page.md#heading` works in both.
myst_heading_anchors = 3

# --------------------------------------------------------------------------------- reference

# In docstrings single backquotes hold names, most of them of the reference itself: a link
# where there is something to link to, and code elsewhere.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", r".*"),
    # Annotations of other libraries: without a network there is nothing to link them to.
    ("py:(class|exc|data)", r"(torch|nn|ray|collections|contextlib|os|pathlib|typing)\..*"),
    # Annotations name classes that are no part of the reference; references that somebody writes
    # name the module, too.
    ("py:(class|exc)", r"[A-Z_]\w*|optional"),
    ("py:class", r"lockstep\..*\.(FailOn|Group|Owned|_Method|_Operator)"),
]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90

# -------------------------------------------------------------------------------------- look

html_theme = "furo"
html_title = "lockstep"
html_static_path = ["site/static"]
html_css_files = ["lockstep.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
# Output that stands below a command is not something to copy.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
copybutton_exclude = ".linenos, .gp, .go"
