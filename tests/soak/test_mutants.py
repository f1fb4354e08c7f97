# SPDX-License-Identifier: Apache-2.0
"""Each mutant of `soak.mutants` fits the source: a mechanism that moves takes its mutant along."""

import pytest

from soak.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_takes_out_something_that_is_there(name):
    mutant = MUTANTS[name]
    text = (ROOT / "src" / "lockstep" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
