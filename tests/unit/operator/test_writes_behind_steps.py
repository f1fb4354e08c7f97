# SPDX-License-Identifier: Apache-2.0
"""Of two ranks at the same step, the one that has made the writes behind the step is further."""

from lockstep.operator.writes_behind_steps import WritesBehindSteps


def _ranks():
    """Behind step 3 the first rank has written, and the second has not."""
    ranks = WritesBehindSteps(), WritesBehindSteps()
    for rank, has_written in zip(ranks, (True, False), strict=True):
        rank.note_unshared(3, has_written=has_written)
    return ranks


def test_a_rank_that_has_written_is_further_until_all_have():
    one, other = _ranks()
    assert one.are_unshared
    assert other.are_unshared
    assert one.written(3) > other.written(3)
    other.note_shared()
    assert one.written(3) == other.written(3)


def test_a_step_that_was_undone_has_no_writes():
    one, other = _ranks()
    assert one.written(2) == other.written(2)


def test_writes_behind_the_last_step_count_more_than_an_epochs_end():
    one, other = _ranks()
    other.ended_epochs = 1
    assert one.written(3) > other.written(3)
    other.note_shared()
    assert one.written(3) < other.written(3)


def test_a_later_step_does_not_hide_one_that_was_missed():
    one, other = _ranks()
    other.note_unshared(5, has_written=True)
    one.note_unshared(5, has_written=False)
    assert not other.written(5).has_last_step
    assert other.written(3) < one.written(3)
    other.note_unshared(7, has_written=False)
    assert not other.written(3).has_last_step
    other.note_shared()
    assert other.written(7).has_last_step
