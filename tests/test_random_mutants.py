# SPDX-License-Identifier: Apache-2.0
"""Random mutants: what is changed, what is not, and that the tests are asked."""

from __future__ import annotations

import pytest
from tests import random_mutants
from tests.random_mutants import (
    PACKAGES,
    ROOT,
    SOURCE,
    Copies,
    Package,
    drawn,
    files_of,
    mutants_of,
)

CHANGES = {
    "a < b": ["(a <= b)"],
    "a is None": ["(a is not None)"],
    "a and b": ["(a or b)"],
    "not a": ["(a)"],
    "a + b": ["(a - b)"],
    "a if c else b": ["(a)", "(b)"],
    "f(k=a)": ["(f())", "pass"],
    "f(**a)": ["(f())", "pass"],
    "a = True": ["(False)"],
    "a = 3": ["(4)"],
    "a.b = c": ["pass"],
    "a += b": ["pass"],
    "raise a": ["pass"],
    "del a": ["pass"],
    "if a:\n    b": ["(True)", "(False)"],
    "def f():\n    return a": ["return"],
    "for a in b:\n    break": ["continue"],
    # Nothing evaluates these, or there is nothing else that they could be.
    "def f(a: b | 3) -> c | 3:\n    return None": [],
    "@f(k=3)\nclass A: pass": [],
    "if TYPE_CHECKING:\n    a = 3": [],
    "f'{a < b}'": [],
    "'a'": [],
}


@pytest.mark.parametrize("text", CHANGES)
def test_what_takes_the_place_of_what(text):
    found = list(mutants_of("a.py", text))
    assert sorted(mutant.new for mutant in found) == sorted(CHANGES[text])


def test_a_change_stands_where_its_text_stood():
    text = "é = 'é'; a = (b\n     < c)  # é\n"
    (mutant,) = mutants_of("a.py", text)
    assert mutant.text(text) == "é = 'é'; a = ((b <= c))  # é\n"
    assert str(mutant) == "a.py:1:16  b < c  ->  (b <= c)"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_files_and_the_tests_of_a_package_are_there(package):
    assert all((SOURCE / place).exists() for place in PACKAGES[package].source)
    assert all((ROOT / place).exists() for place in PACKAGES[package].tests)
    assert files_of(package)


def test_a_seed_draws_the_same_mutants_and_each_compiles():
    mutants = drawn("recovery", 20, seed=7)
    assert mutants == drawn("recovery", 30, seed=7)[:20] != drawn("recovery", 20, seed=8)
    assert len(set(map(str, mutants))) == 20
    for mutant in mutants:
        text = (SOURCE / mutant.file).read_text(encoding="utf-8")
        assert text[mutant.start :].startswith(mutant.old)
        compile(mutant.text(text), mutant.file, "exec")


@pytest.mark.slow
def test_the_tests_are_asked(tmp_path, monkeypatch):
    judge_of = Package(("recovery/incident.py",), ("tests/unit/recovery/test_incident.py",))
    monkeypatch.setitem(random_mutants.PACKAGES, "recovery", judge_of)
    copies = Copies(tmp_path, "recovery", jobs=1)
    assert copies.judge(None, 60.0).outcome == "survived"
    file = "recovery/incident.py"
    text = (SOURCE / file).read_text(encoding="utf-8")
    outcomes = {copies.judge(mutant, 60.0).outcome for mutant in drawn("recovery", 6, seed=1)}
    assert outcomes == {"noticed", "survived"}
    assert (tmp_path / "0" / "src" / "lockstep" / file).read_text(encoding="utf-8") == text
