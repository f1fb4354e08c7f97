# SPDX-License-Identifier: Apache-2.0
"""A rank that came to its end while another one's connection to it broke: only if it did."""

import pytest

from lockstep.audit.facts import Failure, Track
from lockstep.audit.judgement import judge
from lockstep.audit.ledger import Ledger

GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:11940"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation"
NCCL = "NCCL error: remote process exited or there was a network error"


def _codes(kind, message, exit_code=0):
    failed = Ledger(rank=0, world_size=2, failure=Failure(kind, message), exit_code=1)
    ended = Ledger(rank=1, world_size=2, exit_code=exit_code)
    return [found.code for found in judge([failed, ended])]


@pytest.mark.parametrize("message", [GLOO, LATE, NCCL])
def test_who_ended_in_order_is_named(message):
    assert _codes("RuntimeError", message) == ["LS601"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("RuntimeError", "Timed out waiting for the data server"),
    ],
)
def test_connections_of_the_programs_own_say_nothing_of_ranks(kind, message):
    assert _codes(kind, message) == []


def test_who_failed_as_well_has_not_left():
    assert _codes("RuntimeError", GLOO, exit_code=3) == []


def test_an_exception_of_a_ranks_own_tells_for_itself():
    """It breaks the others' connections as well; one of them may have caught that."""
    broken = Ledger(rank=0, world_size=3, failure=Failure("RuntimeError", GLOO), exit_code=1)
    caught = Ledger(rank=1, world_size=3, exit_code=0)
    own = Ledger(rank=2, world_size=3, failure=Failure("ValueError", "no such row"), exit_code=1)
    assert [found.code for found in judge([broken, caught, own])] == []


@pytest.mark.parametrize("message", ["NCCL communicator was aborted on rank 2.", "training failed"])
def test_what_another_rank_says_of_it_in_words_of_its_own_is_no_cause(message):
    broken = Ledger(
        rank=0,
        world_size=3,
        failure=Failure("RuntimeError", GLOO),
        failed_at=10.0,
        exit_code=1,
    )
    left = Ledger(rank=1, world_size=3, exit_code=0)
    later = Ledger(
        rank=2,
        world_size=3,
        failure=Failure("RuntimeError", message),
        failed_at=10.1,
        exit_code=1,
    )
    assert [found.code for found in judge([broken, left, later])] == ["LS601"]


def test_who_did_the_step_that_broke_has_not_left_before_it():
    broken = Ledger(rank=0, world_size=2, failure=Failure("RuntimeError", GLOO), exit_code=1)
    ended = Ledger(rank=1, world_size=2, exit_code=0)
    for ledger, count in ((broken, 3), (ended, 4)):
        ledger.tracks.append(Track("0", "SGD", [], count=count))
    assert [found.code for found in judge([broken, ended])] == []
