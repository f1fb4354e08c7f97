# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/stories show the programs beside them, and what these print."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT / "docs" / "stories"
PAGES = sorted(page for page in STORIES.glob("*.md") if page.name != "README.md")

SHARED = {"two_ranks.py"}
"""Programs that others import."""

FACTS = {
    "all_gather": [
        "plain all_gather                None           None           1.000",
        "own rows put back               0.500          0.500          1.000",
        "own rows put back, loss x 2     1.000          1.000          2.000",
        "1.000          1.000          1.000\n```",
    ],
    "data_parallel": [
        "beside those of optimizer.step(): equal",
        "7 in one process, 4 with replicas",
        "loss of the gathered outputs: equal",
        "averaged over the replicas:   off by 0.500",
        "weights after the step: equal",
        "num_samples: 7",
        "over both workers: equal",
    ],
    "ddp_bypassed": [
        "repaired_by_hand       none                none     none",
        "repaired_by_hand       0.1",
        "with_lockstep          none                none     none\n```",
    ],
    "ray_actor": [
        "the model that came back:    not one bit moved",
        "`if p.grad is not None`: not one bit moved",
        "two workers\n  the model in this program: moved by 0.1674, where one process ends",
    ],
    "ray_sgd": [
        "rows an epoch, of 7                      8         7",
        "weights, from one process                0.1271    none",
        "val_loss, from one process               0.2820    none",
    ],
}
"""What the prose of each page rests on: a refreshed page that lost it needs other prose."""


def _refresh(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "docs" / "refresh.py"), "--check", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_program_is_run_by_its_page_and_every_page_is_listed():
    index = (STORIES / "README.md").read_text()
    assert {page.stem for page in PAGES} == FACTS.keys()
    for page in PAGES:
        assert f"<!-- run: {page.stem}.py -->" in page.read_text()
        assert f"]({page.name})" in index
    assert {p.name for p in STORIES.glob("*.py")} - SHARED == {f"{p.stem}.py" for p in PAGES}


def test_the_pages_show_the_source_as_it_is():
    done = _refresh("--without-running")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_prose_rests_on_what_is_shown(page):
    shown = page.read_text()
    assert [fact for fact in FACTS[page.stem] if fact not in shown] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_print_what_the_pages_show(page):
    done = _refresh(page)
    assert done.returncode == 0, done.stdout + done.stderr


def _refresher():
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_page_that_is_old_is_rewritten(tmp_path):
    (tmp_path / "program.py").write_text(
        "@print\ndef shown():\n    return 1\n\n\ndef other():\n    pass\n\n\nprint('new')\n"
    )
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- source: program.py shown -->\n```python\nold\n```\n\nprose\n\n"
        "<!-- run: program.py -->\n```text\nold\n```\n"
    )
    after = _refresher().refreshed(page, lambda program: f"ran {program.name}\n")
    assert after == (
        "<!-- source: program.py shown -->\n```python\n@print\ndef shown():\n    return 1\n```\n\n"
        "prose\n\n<!-- run: program.py -->\n```text\nran program.py\n```\n"
    )
    assert _refresh("--without-running", page).returncode == 1
    assert _refresher().output(tmp_path / "program.py").endswith("new\n")
