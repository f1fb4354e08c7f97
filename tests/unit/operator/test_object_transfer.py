# SPDX-License-Identifier: Apache-2.0
"""An object goes from one rank to another, with its tensors."""

import pytest
import torch

from harness import run_ranks
from lockstep.operator.object_transfer import all_gather, transfer

VALUE = {"rows": torch.arange(5.0), "half": [torch.ones(3, dtype=torch.float16), "text"], "n": 3}


@pytest.mark.parametrize(("source", "destination"), [(0, 1), (2, 0), (1, 1)])
def test_it_arrives_on_one_rank(source, destination):
    def body(group):
        value = VALUE if group.rank == source else "ignored"
        return transfer(group, value, source=source, destination=destination)

    got = run_ranks(3, body)
    assert [each is None for each in got] == [rank != destination for rank in range(3)]
    arrived = got[destination]
    assert torch.equal(arrived["rows"], VALUE["rows"])
    assert torch.equal(arrived["half"][0], VALUE["half"][0])
    assert (arrived["half"][1], arrived["n"]) == ("text", 3)


def test_none_and_empty_tensors():
    def body(group):
        sent = [None, (torch.empty(0, 3),)]
        return [transfer(group, each, source=0, destination=1) for each in sent]

    nothing, (empty,) = run_ranks(2, body)[1]
    assert nothing is None
    assert empty.shape == (0, 3)


def test_each_rank_has_the_values_of_all():
    def body(group):
        value = {"rows": [torch.full((group.rank, 2), float(group.rank))] * group.rank, "text": "x"}
        return all_gather(group, value, "a value")

    for found in run_ranks(3, body):
        assert [each["text"] for each in found] == ["x"] * 3
        for rank, each in enumerate(found):
            assert [rows.tolist() for rows in each["rows"]] == [[[rank, rank]] * rank] * rank
