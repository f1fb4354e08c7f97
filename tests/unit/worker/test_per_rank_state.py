# SPDX-License-Identifier: Apache-2.0
"""What `per_rank_state` puts into a state for all ranks is there for each of as many."""

from lockstep.worker.per_rank_state import add_every_rank, part_of_rank


def test_each_rank_of_as_many_gets_its_own_and_others_rank_0s():
    state = {"models": ["shared"], "operator": None, "local": "of 0"}
    saved = add_every_rank(state, [{"local": "of 0"}, {"local": "of 1"}])
    assert saved.items() >= state.items()
    assert part_of_rank(saved, 1, 2) == {**state, "local": "of 1"}
    assert part_of_rank(saved, 2, 3) == part_of_rank(state, 0, 1) == state
