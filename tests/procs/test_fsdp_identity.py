# SPDX-License-Identifier: Apache-2.0
"""Under `fsdp` a program's parameters stay the ones that it has listed, and are always whole."""

import pytest
from tests.procs import fsdp_parts
from tests.procs.fsdp_identity import CODES, SAME, SAME_BY_NAME
from tests.procs.fsdp_parts import PARTS
from tests.procs.test_fsdp_exact import results_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("identity"), "identity", 2)


@pytest.mark.parametrize("case", [*SAME, *fsdp_parts.SAME], ids=lambda case: case.__name__)
def test_as_one_process(ranks, case):
    for found in ranks:
        apart = found[case.__name__]
        assert isinstance(apart, float), apart
        assert apart < 1e-12


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, id=f"{case.__name__}-{name}")
        for case, names in SAME_BY_NAME.items()
        for name in names
    ],
)
def test_each_as_in_one_process(ranks, case, name):
    for found in ranks:
        apart = found[case.__name__]
        assert isinstance(apart, dict), apart
        # Those that divide by what may be tiny magnify the order of additions.
        assert apart[name] < 1e-10


@pytest.mark.parametrize(
    ("case", "code"),
    (CODES | fsdp_parts.CODES).items(),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_refused_on_every_rank(ranks, case, code):
    assert [found[case.__name__] for found in ranks] == [code, code]


@pytest.mark.parametrize("name", PARTS)
def test_a_write_that_is_lost_is_refused_on_every_rank(ranks, name):
    for found in ranks:
        assert "[LS003]" in found["parts_written_to"][name]
        assert "sharded dimension" in found["parts_written_to"][name]


def test_a_step_that_one_rank_leaves_out_is_named_before_anything_changes(ranks):
    found = ranks[0]["a_step_that_one_rank_leaves_out"]
    assert found == {
        "said": "rank 1 did not come to a backward, or to a step of an optimizer that is sharded",
        "same": True,
    }
