# SPDX-License-Identifier: Apache-2.0
"""What a thread says that it is doing, asked from another one."""

from __future__ import annotations

import threading

import pytest

from lockstep.phases import Phase, in_phase, phase_of


@in_phase(Phase.BACKWARD)
def _fails() -> None:
    raise ValueError("in the middle")


def test_the_phase_entered_last_holds_until_it_is_left_also_by_an_error() -> None:
    here = threading.get_ident()
    assert phase_of(here) is Phase.USER_CODE
    with in_phase(Phase.FORWARD):
        with in_phase(Phase.WAITING):
            assert phase_of(here) is Phase.WAITING
        with pytest.raises(ValueError, match="in the middle"):
            _fails()
        assert phase_of(here) is Phase.FORWARD
    assert phase_of(here) is Phase.USER_CODE


def test_each_thread_has_a_phase_of_its_own() -> None:
    has_entered, may_leave = threading.Event(), threading.Event()

    def waits() -> None:
        with in_phase(Phase.WAITING):
            has_entered.set()
            may_leave.wait()

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    has_entered.wait()
    assert thread.ident is not None
    assert phase_of(thread.ident) is Phase.WAITING
    assert phase_of(threading.get_ident()) is Phase.USER_CODE
    may_leave.set()
    thread.join()
    assert phase_of(thread.ident) is Phase.USER_CODE


def test_a_users_traceback_shows_no_frame_besides_those_of_the_library() -> None:
    with pytest.raises(ValueError, match="in the middle") as caught:
        _fails()
    files = [entry.path.name for entry in caught.traceback]
    assert files == ["test_phases.py", "phases.py", "test_phases.py"]
