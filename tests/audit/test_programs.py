# SPDX-License-Identifier: Apache-2.0
"""Programs that are wrong are found, with the code and the line; programs that are right are not.

A wrong program says on its telling line what has to be found there: ``# here LS101``. The line has
to be among the places of the finding.
"""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WRONG = sorted((HERE / "bugs").glob("*.py"))
RIGHT = sorted((HERE / "healthy").glob("*.py"))

# The others are run by `make test-all`.
QUICK = {
    "a_method_of_module",
    "b_unfrozen",
    "c_no_sync_off_by_one",
    "e_plain_gather",
    "f_flat_not_divided",
    "f_tokens_per_rank",
    "g_no_sampler",
    "i_rank0_loads",
    "j_clip_before_sync",
    "k_none_skipped",
    "k_rank_0_for_all",
    "l_deep_copy",
    "m_mismatched_collectives",
    "accumulation",
    "batch_norm_and_dropout",
    "gan",
    "gather_adjoint",
    "halved_by_hand",
    "local_sgd",
    "weighted_tokens",
}


def _cases(paths):
    return [
        pytest.param(p, id=p.stem, marks=[] if p.stem in QUICK else [pytest.mark.slow])
        for p in paths
    ]


def test_the_quick_ones_exist():
    assert {p.stem for p in WRONG + RIGHT} >= QUICK


@pytest.mark.parametrize("program", _cases(WRONG))
def test_what_is_wrong_is_found(pool, program):
    marked = [
        (number, match.group(1))
        for number, line in enumerate(program.read_text().splitlines(), start=1)
        if (match := re.search(r"# here (LS\d+)", line))
    ]
    assert len(marked) == 1, "one line of the program says what has to be found"
    line, code = marked[0]
    ledgers = pool.ledgers(program)
    findings = pool.judge(ledgers)
    graver = [f for f in findings if f.severity != "notice" or f.code == code]
    assert code in {f.code for f in graver}, [(f.code, f.message) for f in findings]
    places = [p for f in graver if f.code == code for p in f.where]
    assert (str(program), line) in {(p.file, p.line) for p in places}
    assert not any(ledger.facts.unseen for ledger in ledgers), "the probe saw everything"
    assert {f.code for f in graver} <= {code}, "and nothing else is claimed"


@pytest.mark.parametrize("program", _cases(RIGHT))
def test_what_is_right_is_not_found_fault_with(pool, program):
    ledgers = pool.ledgers(program)
    assert [led.failure for led in ledgers] == [None, None]
    assert not any(led.facts.unseen for led in ledgers), "the probe saw everything"
    # A program whose steps are its own arithmetic has backwards, and no track.
    seen = [max([led.facts.backwards, *(t.count for t in led.tracks)]) for led in ledgers]
    assert min(seen) > 1, "it was watched"
    found = pool.judge(ledgers)
    assert [(f.code, f.message) for f in found if f.severity != "notice"] == []
