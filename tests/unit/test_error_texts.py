# SPDX-License-Identifier: Apache-2.0
"""An error's text can be quoted, whatever it holds."""

import pytest

from lockstep.error_texts import error_text, first_line, first_of
from lockstep.group_errors import missing_ranks_error


class CannotBeShown(Exception):
    def __str__(self):
        raise ValueError("its text needs what is not there")


def test_an_error_without_a_text_of_its_own_is_named():
    assert error_text(CannotBeShown()) == "CannotBeShown, whose own text cannot be shown"
    assert error_text(ValueError("why")) == "why"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError(), "RuntimeError()"),
        (RuntimeError(" \n"), "RuntimeError"),
        (CannotBeShown(), "CannotBeShown, whose own text cannot be shown"),
        (RuntimeError("\nfirst\nsecond"), "first"),
    ],
)
def test_the_first_line_of_an_error(error, line):
    assert first_line(error) == line


def test_a_backend_may_fail_without_a_word():
    assert "RuntimeError" in str(missing_ranks_error([1], "step", "it", "rank 0", RuntimeError()))


def test_of_many_names_the_first_are_shown():
    assert first_of(["a", "b"], 2) == "a, b"
    assert first_of(["a", "b", "c"], 1, "; ") == "a; and 2 more"
