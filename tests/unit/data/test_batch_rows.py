# SPDX-License-Identifier: Apache-2.0
"""Counting, joining and slicing the rows of batches of any structure."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep.content_digest import content_digest
from lockstep.data.batch_join import concatenate
from lockstep.data.batch_rows import count_samples, leading_length, slice_rows
from lockstep.errors import NotShardableError

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Record:
    tokens: torch.Tensor
    names: list


def batch(first: int, rows: int) -> dict:
    x = torch.arange(first, first + rows, dtype=torch.float64)
    names = [f"n{first + i}" for i in range(rows)]
    return {
        "pair": Pair(x, x.numpy() * 2),
        "record": Record(x[:, None] + 1, names),
        "list": [x, (x.bool(), names)],
        "scale": 3,
    }


def test_joined_batches_are_the_one_that_holds_all_rows() -> None:
    joined = concatenate([batch(0, 2), batch(2, 1), batch(3, 3)])
    assert content_digest(joined) == content_digest(batch(0, 6))
    assert isinstance(joined["pair"], Pair)
    assert isinstance(joined["record"], Record)
    ordered = concatenate([OrderedDict(x=torch.ones(1)), OrderedDict(x=torch.ones(2))])
    assert type(ordered) is OrderedDict
    assert len(ordered["x"]) == 3
    alone = object()
    assert concatenate([alone]) is alone


def test_a_batch_without_rows_has_the_same_structure() -> None:
    empty = slice_rows(batch(0, 4), slice(0))
    assert content_digest(empty) == content_digest(batch(0, 0))
    assert empty["record"].tokens.shape == (0, 1)
    assert leading_length(empty) == 0


def test_length_is_that_of_the_first_tensor_array_or_sequence() -> None:
    assert leading_length(batch(0, 5)) == 5
    assert leading_length([torch.tensor(0.5), torch.ones(7, 2)]) == 7
    assert leading_length(("ab", ["a", "b", "c"])) == 3
    assert leading_length({"n": np.ones((4, 2))}) == 4
    assert leading_length(Record(torch.ones(6), [])) == 6
    without_edges = {"edges": torch.ones(0, 2), "nodes": {"x": torch.ones(5, 3)}}
    assert leading_length(without_edges) == 5
    assert leading_length((torch.ones(0, 2), [torch.ones(0)], 3.0)) == 0
    with pytest.raises(NotShardableError, match="number of samples"):
        leading_length(3)


def test_a_batch_of_time_steps_first_has_as_many_samples_as_were_asked_for() -> None:
    steps, targets = torch.ones(5, 3, 2), torch.ones(3)
    assert count_samples((steps, targets), 3) == 3
    assert count_samples({"x": steps.numpy(), "n": [1, 2, 3], "y": targets, "scale": 2.0}, 3) == 3
    assert count_samples((torch.ones(5, 3), targets, torch.ones(3, 5)), 3) == 3
    # Nothing else shows that a row is no sample.
    for alike in (
        (steps, targets, torch.ones(5)),  # a target for each row
        (steps, torch.ones(5, 3)),
        (steps,),
        (torch.ones(5, 4, 3), targets),
        (torch.ones(5), targets),
        (targets, steps),  # three rows in any case
    ):
        assert count_samples(alike, 3) == leading_length(alike)
    # Rows are samples, beside what belongs to no sample: points of time, weights of classes.
    assert count_samples((torch.ones(5, 3, 2), targets), 5) == 5
    assert count_samples((torch.ones(5, 3), targets), 5) == 5


@pytest.mark.parametrize(
    ("parts", "place"),
    [
        ([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}], r"batch\['x'\]"),
        ([(torch.ones(2), torch.tensor(1.0))] * 2, r"batch\[1\]"),
        ([{"a": {"b": object()}}] * 2, r"batch\['a'\]\['b'\]"),
        ([{"scale": 1, "x": torch.ones(1)}, {"scale": 2, "x": torch.ones(1)}], r"\['scale'\]"),
        ([Record(torch.ones(1), [object()]), Record(torch.ones(1), [object()])], r"batch.names"),
        ([{"x": torch.ones(1)}, {"y": torch.ones(1)}], r"batch cannot.*"),
        ([{"x": torch.ones(1)}, {"x": torch.ones(1), "y": torch.ones(1)}], r"without \['y'\]"),
        ([[torch.ones(1)] * 3, [torch.ones(1)] * 4], r"without \[3\]"),
        ([torch.ones(1), np.ones(1)], "batch cannot"),
        ([pack_sequence([torch.ones(2)])] * 2, "batch cannot"),
    ],
)
def test_what_cannot_be_joined_is_refused_by_name(parts: list, place: str) -> None:
    with pytest.raises(NotShardableError, match=place):
        concatenate(parts)


def test_what_has_no_empty_version_is_refused_with_drop_last() -> None:
    for value in (pack_sequence([torch.ones(2)]), [object()], {"x": torch.tensor(1.0)}):
        with pytest.raises(NotShardableError, match="drop_last=True"):
            slice_rows(value, slice(0))
