# SPDX-License-Identifier: Apache-2.0
"""Every code block of every page runs: here, or in a test that is named here."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.programs.blocks import ROOT, YOURS, blocks_of, compare, files_of, is_run, run_page

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

ELSEWHERE = {
    "docs/how-to/cluster.md": "tests/programs/test_cluster_page.py",
    "docs/how-to/command-line.md": "tests/programs/test_how_to.py",
    "docs/security.md": "tests/programs/test_cluster_page.py",
}
"""Pages whose blocks another test runs."""

FRAGMENTS = sorted((DOCS / "rules").glob("LS*.md"))
"""Two or three lines of somebody's program each, which `lockstep explain` prints. They are parsed
here; programs with these lines in them, wrong ones and right ones, are audited by tests/audit."""

TYPED = {
    "docs/how-to/debugging.md": "p images.shape\ncontinue\n",
    "docs/how-to/why-did-the-loss-spike.md": "p batch[1].max()\ncontinue\n",
}
"""What a reader types meanwhile."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def runs_here(page: Path) -> bool:
    commands = [command for block in blocks_of(page) for command in filter(is_run, block.commands)]
    return (
        page not in FRAGMENTS and name(page) not in ELSEWHERE and bool(files_of(page) or commands)
    )


RUN_HERE = [page for page in PAGES if runs_here(page)]
MADE = [page for page in PAGES if "\n<!-- run: " in page.read_text(encoding="utf-8")]


def test_pages_that_run_elsewhere_are_read_there():
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")
    # The stories, and the pages for those who come from elsewhere, show programs beside them.
    for folder in ("stories", "coming-from"):
        pages = {page for page in (DOCS / folder).glob("*.md") if page.name != "README.md"}
        assert pages <= set(MADE)
        assert not pages & set(RUN_HERE), "a block that nobody makes or runs"


def test_languages_are_known():
    """A block that calls itself something else would be run by nobody."""
    known = {"python", "bash", "text", "{eval-rst}", "{include} ../CHANGELOG.md"}
    known |= {"{include} ../CONTRIBUTING.md", "yaml"}
    found = {(name(page), block.language) for page in PAGES for block in blocks_of(page)}
    assert {(page, language) for page, language in found if language not in known} == set()


def test_fragments_are_python():
    assert len(FRAGMENTS) > 30
    for page in FRAGMENTS:
        for block in blocks_of(page):
            assert block.language == "python"
            ast.parse(block.body)


def test_commands_that_are_not_run_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    for page in PAGES:
        commands = [command for block in blocks_of(page) for command in block.commands]
        for command in commands:
            program, *words = shlex.split(command, comments=True)
            if program == "make":
                assert set(words) <= targets, (name(page), command)
            elif program == "pip":
                asked = re.findall(r"\[([\w,]+)\]", command)
                assert set(",".join(asked).split(",")) <= {*extras, ""}, (name(page), command)
            elif program == "source":
                assert words == [".venv/bin/activate"], (name(page), command)
            elif program.startswith(".venv/"):
                files = [word for word in words if "/" in word]
                assert all((ROOT / file).exists() for file in files), (name(page), command)
            else:
                known = is_run(command) or command in YOURS or name(page) in ELSEWHERE
                assert known, (name(page), command)


def test_what_is_shown_is_compared():
    compare("a 1.00\n...\nb 97%, 3e-08, 12\n", "a  1.04\nx\ny\nb  95%, 1e-07, 12\n")
    compare("...\nend\n", "end\n")
    for shown, printed in [
        ("12\n", "13\n"),
        ("0.50\n", "0.70\n"),
        ("a\n", "b\n"),
        ("a\n", "a\nb\n"),
    ]:
        with pytest.raises(AssertionError):
            compare(shown, printed)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", RUN_HERE, ids=name)
def test_a_page_runs(page, tmp_path):
    run_page(page, tmp_path, typed=TYPED.get(name(page), ""))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "page", [page for page in MADE if page.parent == DOCS], ids=lambda page: page.stem
)
def test_output_is_what_the_programs_print(page):
    """Those of the pages in folders are in tests of their own."""
    done = subprocess.run(
        [sys.executable, str(DOCS / "refresh.py"), "--check", str(page)],
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
