# SPDX-License-Identifier: Apache-2.0
"""A failure gets through, whatever its class does."""

from dataclasses import dataclass

import pytest
import torch

from lockstep.errors import WorkerFailedError
from lockstep.worker import add_rank, failed_outcome


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


@dataclass
class HoldsTensor(Exception):
    code: torch.Tensor


class CannotBeShown(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class TakesNoNotes(Exception):
    def add_note(self, note):
        raise TypeError("no notes")


def raised(make):
    try:
        try:
            raise make()
        except Exception as first:
            raise make() from first
    except Exception as second:
        return second


@pytest.mark.parametrize(
    "make",
    [lambda: HoldsTensor(torch.ones(3)), CannotBeShown, TakesNoNotes],
    ids=["tensor", "text", "notes"],
)
def test_a_failure_of_any_class_arrives_as_itself(make):
    error = raised(make)
    outcome = failed_outcome(2, error)
    assert "raised on rank 2" in outcome.notes[-1]
    assert "in raised" in outcome.notes[-1]
    arrived = outcome.exception()
    assert type(arrived) is type(error)
    assert error.__traceback__ is None
    add_rank(arrived, 2)


def test_an_exception_that_no_attribute_can_be_set_on_is_shown():
    arrived = failed_outcome(1, raised(lambda: Frozen(3))).exception()
    assert type(arrived) is WorkerFailedError
    assert "Frozen" in str(arrived)
    assert "raised on rank 1" in arrived.__notes__[-1]
