# SPDX-License-Identifier: Apache-2.0
"""Ranks compare the order of units, follow the order of an earlier step, and may leave it."""

import pytest
import torch

from lockstep.errors import PeerLostError, UnitOrderError
from lockstep.sync.unit_order import GATHER, REDUCE, ROUND, UnitAction, UnitOrder
from lockstep.testing import run_ranks

NAMES = ("first", "second", "model")


def action(what, unit=0):
    return UnitAction(what, unit, 4, torch.float32)


def step_of(*units):
    forward = [action(GATHER, unit) for unit in units]
    return [*forward, *(action(REDUCE, unit) for unit in reversed(units)), UnitAction(ROUND)]


FORTH, BACK = step_of(0, 1), step_of(1, 0)


class Counted:
    """A group that counts its exchanges."""

    def __init__(self, group):
        self.group, self.place, self.num_exchanges = group, group.place, 0

    def exchange(self, value):
        self.num_exchanges += 1
        return self.group.exchange(value)


class Rank:
    """A rank's order, and what it takes part in after it has left a plan."""

    def __init__(self, group):
        self.counted = Counted(group)
        self.order = UnitOrder(self.counted, NAMES)
        self.order.take_part = self.take_part
        self.order.may_begin_step = True
        self.taken_part = []
        group.watch(self.order.before_other_collective)

    def take_part(self, action):
        self.taken_part.append(action)

    def go(self, steps):
        """The exchanges of each step."""
        counts = []
        for actions in steps:
            before = self.counted.num_exchanges
            for each in actions:
                self.order.compare(each)
            counts.append(self.counted.num_exchanges - before)
        return counts


def test_a_step_like_the_one_before_is_compared_at_its_beginning_and_its_end():
    def work(group):
        return Rank(group).go([FORTH] * 5)

    assert run_ranks(3, work) == [[5, 5, 2, 2, 2]] * 3


def test_steps_that_take_turns_are_followed_too():
    def work(group):
        return Rank(group).go([FORTH, BACK] * 4)

    assert run_ranks(2, work) == [[5, 5, 5, 2, 2, 2, 2, 2]] * 2


@pytest.mark.parametrize(
    ("other", "left"),
    [
        (BACK, FORTH[0:0]),  # from the first forward on: nothing was agreed
        (step_of(0, 2), FORTH[1:-1]),
        (step_of(0), FORTH[1:-1]),
        (step_of(0, 1, 2), FORTH[2:-1]),
        ([*FORTH[:-1], action(REDUCE, 2), UnitAction(ROUND)], []),
        (FORTH[:3] + FORTH[4:], FORTH[3:-1]),
    ],
)
def test_one_rank_leaves_the_order_and_all_refuse(other, left):
    def work(group):
        rank = Rank(group)
        rank.go([FORTH] * 3)
        with pytest.raises(UnitOrderError) as caught:
            rank.go([other if group.rank else FORTH])
        # The peers are not left alone: they are where the error says so.
        assert rank.taken_part == (left if group.rank else [])
        # Nothing of it is expected again.
        assert rank.go([BACK] * 3) == [5, 5, 2]
        return str(caught.value)

    messages = run_ranks(2, work)
    assert messages[0].replace("rank 0 of", "rank 1 of") == messages[1]


def test_all_ranks_leave_the_order_and_go_on():
    def work(group):
        rank = Rank(group)
        rank.go([FORTH] * 3)
        counts = rank.go([step_of(0, 2)] * 5)
        return counts, rank.taken_part

    counts, taken_part = run_ranks(2, work)[0]
    # The way that the run began with is expected once more, and left once more.
    assert counts == [5, 5, 5, 5, 2]
    assert taken_part == FORTH[1:-1] * 2


def test_another_collective_leaves_the_order():
    def work(group):
        rank = Rank(group)
        rank.go([FORTH] * 3)
        for each in FORTH[:2]:
            rank.order.compare(each)
        alone = group.rank == 1
        with pytest.raises(UnitOrderError, match="communicates something else"):
            if alone:
                group.exchange("alone")
            for each in FORTH[2:]:
                rank.order.compare(each)
        return rank.taken_part

    assert run_ranks(2, work) == [[], FORTH[2:-1]]


def test_an_order_that_meets_what_another_rank_exchanges_says_so():
    names = [f"layer{number}" for number in range(20)]

    def work(group):
        if group.rank:
            group.exchange(names)
            return ""
        with pytest.raises(UnitOrderError) as caught:
            Rank(group).go([FORTH])
        return str(caught.value)

    assert f"rank 1 is at {names}" in run_ranks(2, work)[0]


def test_the_round_tells_what_the_ranks_tell():
    def work(group):
        rank = Rank(group)
        rank.go([FORTH] * 3)
        for each in FORTH[:-1]:
            rank.order.compare(each)
        return rank.order.end_round(["f", group.rank])

    assert run_ranks(3, work) == [[["f", 0], ["f", 1], ["f", 2]]] * 3


def test_a_program_that_changes_its_way_all_the_time_is_compared():
    def work(group):
        rank, counts = Rank(group), []
        order = torch.randint(0, 3, (120,), generator=torch.Generator().manual_seed(0))
        for second in order.tolist():
            counts += rank.go([step_of(0, second), step_of(0, second)])
        return counts, len(rank.taken_part)

    counts, taken_part = run_ranks(2, work)[0]
    assert set(counts[-40:]) == {5}
    assert taken_part < 60


def test_an_evaluation_is_compared_and_changes_nothing():
    def work(group):
        rank = Rank(group)
        rank.go([FORTH] * 3)
        rank.order.may_begin_step = False
        evaluation = rank.go([FORTH[:2]] * 2)
        rank.order.may_begin_step = True
        return evaluation, rank.go([FORTH])

    assert run_ranks(2, work) == [([2, 2], [2])] * 2


def test_ranks_that_expect_different_orders_follow_none():
    def work(group):
        rank = Rank(group)
        # One rank evaluates, another one trains, so far alike.
        rank.order.may_begin_step = group.rank == 0
        rank.go([FORTH[:2]])
        rank.order.may_begin_step = True
        counts = rank.go([FORTH] * 4)
        return counts, rank.taken_part

    counts = run_ranks(2, work)
    assert counts[0] == counts[1]
    assert counts[0][0][-2:] == [2, 2]
    assert counts[0][1] == []


def test_a_lost_peer_leaves_no_order_behind():
    def work(group):
        rank = Rank(group)
        rank.go([FORTH] * 3)
        for each in FORTH[:-1]:
            rank.order.compare(each)
        if group.rank == 1:
            group.close()
            return True
        with pytest.raises(PeerLostError):
            rank.order.compare(FORTH[-1])
        # Not an IndexError of the order's own.
        with pytest.raises(PeerLostError):
            group.exchange("anybody?")
        return True

    assert all(run_ranks(2, work))


def test_a_norm_between_steps_does_not_hide_the_order():
    def work(group):
        rank = Rank(group)
        counts = []
        for step in [FORTH, BACK] * 4:
            counts += rank.go([step])
            rank.order.compare_collective("allreduce", 1)
        return counts

    assert run_ranks(2, work) == [[5, 5, 5, 2, 2, 2, 2, 2]] * 2


def test_models_that_look_alike_are_told_apart():
    def work(group):
        orders = [UnitOrder(group, NAMES) for _ in range(2)]
        for order in orders:
            order.agree_on_number()
        for order in orders:
            order.compare(action(GATHER))
        with pytest.raises(UnitOrderError, match="sync number"):
            orders[group.rank].compare(action(GATHER))
        return orders[1].number - orders[0].number

    # The ranks are threads, which share the count of their process.
    assert all(apart > 0 for apart in run_ranks(2, work))
