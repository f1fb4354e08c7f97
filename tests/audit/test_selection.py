# SPDX-License-Identifier: Apache-2.0
"""What `--only` and `--ignore` leave out is counted in every report, and never "in lockstep"."""

import json

import pytest

from audit.ledgers import of_one_step
from lockstep.audit.options import Options
from lockstep.audit.outcome import report


@pytest.fixture
def reported(tmp_path, capsys):
    def of(norms, **asked):
        files = {"json": str(tmp_path / "report.json"), "html": str(tmp_path / "report.html")}
        options = Options("train.py", ["--lr", "0.1"], **files, **asked)
        ledgers = [of_one_step(*each, world_size=len(norms)) for each in enumerate(norms)]
        codes = [finding.code for finding in report(options, ledgers, len(norms))]
        held = json.loads((tmp_path / "report.json").read_text())
        return codes, held, capsys.readouterr().err, (tmp_path / "report.html").read_text()

    return of


def test_what_was_found_and_not_asked_for_is_said(reported):
    codes, *_ = reported((1.0, 2.0))
    assert codes
    left, held, said, page = reported((1.0, 2.0), ignore=tuple(codes))
    assert left == []
    assert held["left_out"] == {code: codes.count(code) for code in codes}
    assert held["ignore"] == codes
    options = f"--ignore {','.join(codes)}"
    for text in (said, page):
        assert "nothing else was found" in text
        assert "left out: " in text
        assert options in text
        assert "in lockstep" not in text
    _, held, said, page = reported((1.0, 2.0), only=(codes[0],))
    assert sum(held["left_out"].values()) == len(codes) - codes.count(codes[0])
    assert f"(--only {codes[0]})" in said
    assert f"(--only {codes[0]})" in page


def test_where_nothing_was_left_out_it_is_in_lockstep(reported):
    codes, held, said, page = reported((1.0, 1.0), ignore=("LS5",))
    assert codes == []
    assert held["left_out"] == {}
    assert ": in lockstep" in said
    assert "in lockstep" in page
    assert "left out" not in said + page


def test_the_page_says_what_ran(reported):
    _, held, _, page = reported((1.0, 1.0))
    assert held["command"] == ["train.py", "--lr", "0.1"]
    assert "<h1>lockstep audit train.py --lr 0.1</h1>" in page
    assert f"ended {held['finished']}" in page


def test_one_process_is_in_lockstep_with_nobody_on_the_page_too(reported):
    _, _, said, page = reported((1.0,))
    for text in (said, page):
        assert "one process trained, so there was nothing to compare" in text
        assert "in lockstep" not in text
