# SPDX-License-Identifier: Apache-2.0
"""What programs do around a model in shards is exact, or refused by name on every rank."""

import pytest
from tests.procs import units_beginnings
from tests.procs.test_fsdp_exact import results_of
from tests.procs.units_cases import REFUSED, SAME
from tests.torch_versions import needs_unit_hooks

pytestmark = [needs_unit_hooks, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("units"), "units", 2)


@pytest.mark.parametrize("case", [*SAME, *units_beginnings.SAME], ids=lambda case: case.__name__)
def test_as_one_process(ranks, case):
    for found in ranks:
        apart = found[case.__name__]
        assert isinstance(apart, float), apart
        assert apart < 1e-12


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_refused_on_every_rank(ranks, case):
    code, words = REFUSED[case]
    for found in ranks:
        assert f"[{code}]" in found[case.__name__], found[case.__name__]
        assert words in found[case.__name__], found[case.__name__]
