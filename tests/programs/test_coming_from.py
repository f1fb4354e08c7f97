# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/coming-from show the programs beside them, and what these print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "coming-from"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")

FACTS = {
    "from_accelerate": ["weights of the two: equal\nweights of the two: equal\n```"],
    "from_lightning": ["weights of the two: equal\n```"],
    "from_ray_data": ["epochs begun: 1\nrows, each once: True\n```"],
    "from_ray_train": ["weights of the two: equal\n```"],
    "from_raysgd": ["weights of the two: equal\n```"],
}
"""What the prose of each page rests on: a refreshed page that lost it needs other prose."""


def _refresh(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "docs" / "refresh.py"), "--check", *map(str, arguments)],
        # A cluster of their own, also where another one runs on this machine.
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_pages_show_the_source_as_it_is():
    done = _refresh("--without-running", *PAGES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_prose_rests_on_what_is_shown(page):
    shown = page.read_text()
    assert f"<!-- run: {page.stem}.py -->" in shown
    assert f"]({page.name})" in (FOLDER / "README.md").read_text()
    assert [fact for fact in FACTS[page.stem] if fact not in shown] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_print_what_the_pages_show(page):
    done = _refresh(page)
    assert done.returncode == 0, done.stdout + done.stderr
