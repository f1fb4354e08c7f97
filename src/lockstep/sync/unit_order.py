# SPDX-License-Identifier: Apache-2.0
"""`UnitOrder`: makes sure that the ranks of a sharded model go through its units in one order.

A gather of one layer that meets a gather of another layer fills it with the other's weights where
their sizes are equal, and hangs where they are not. Two ways lead to one order:

- *Comparing.* A few integers go ahead of each collective, on the CPU, and every rank raises the
  same error where they differ, before a weight or a gradient has moved.
- *Following.* A step usually takes the units as an earlier step did. Once all ranks have gone
  through a step alike, they know its order (a plan), and agree at the beginning of a later step to
  follow it. From then on a rank compares what it does with the plan, and nothing with other ranks.
  A rank that is about to do something else takes part in the collectives that the plan has left
  first: with its own rows of weights, and zeros for gradients. So no rank hangs, and none computes
  with wrong weights. At the end of the backward, where all ranks meet, it says so: every rank
  raises the error before an optimizer steps. Where all ranks have left the plan at one place for
  one thing, the program has changed, and they go on by comparing.

What goes around `Group` and DTensor (``torch.distributed`` called by hand in a forward) is seen by
neither.

Rejected: the integers inside the payload itself (payloads of unequal size hang), and one comparison
of the whole order at the end of a step without a plan (a hang comes before it).
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lockstep._torch_compat.fully_shard import COLLECTIVES
from lockstep.error_texts import first_of
from lockstep.errors import UnitOrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from lockstep.group import Group

GATHER: Final = 0
REDUCE: Final = 1
ROUND: Final = 2

_WORDS: Final = {
    GATHER: "gathers the weights of {unit}",
    REDUCE: "reduces the gradients of {unit}",
    ROUND: "has ended its backward",
}
_ELSEWHERE: Final = len(_WORDS)
_OTHERS: Final = _ELSEWHERE + 1
_NUMBERS: Final = 6

_MOST_PLANS: Final = 16
_FOLLOWED_FOR_EACH_LEFT: Final = 20
_FREE: Final = 80
"""A plan may be left once in so many steps, and a few times before that."""


_last_number = 0
"""The number of the models that this process has put into units last."""


class UnitAction(NamedTuple):
    """What a rank does next.

    Attributes:
        what: GATHER, REDUCE or ROUND; a larger number for what no plan holds.
        unit: its number.
        size: elements that the rank sends.
        dtype: of those.
    """

    what: int
    unit: int = 0
    size: int = 0
    dtype: torch.dtype | None = None


class Plan(NamedTuple):
    """What the ranks do from the first forward of a step until its backward has ended.

    Attributes:
        actions: in their order.
        digest: a number that tells plans apart.
    """

    actions: tuple[UnitAction, ...]
    digest: int


class UnitOrder:
    """One rank's place in the common order.

    Args:
        group: the ranks; its metadata has to travel on the CPU.
        names: of the units, by number.

    Attributes:
        group: the same.
        number: of the models among those that the ranks have in units; the same on every rank.
        may_begin_step: the next gather is for a forward with gradients: without them, in an
            evaluation, no backward would end the step.
        step: tells the number of this rank's step: a forward of another step gathers weights of
            another step.
        take_part: joins the other ranks in an action of the plan that this rank does not need.
    """

    def __init__(self, group: Group, names: Sequence[str]) -> None:
        self.group = group
        self._names = list(names)
        self.step: Callable[[], int] = lambda: 0
        self.take_part: Callable[[UnitAction], None] = lambda _: None
        self._plans = _Plans()
        self._plan: Plan | None = None
        self._place = 0
        self._seen: list[UnitAction] | None = None
        self._is_open = False  # between the first forward of a step and the end of its backward
        self._is_own = False
        self.may_begin_step = False
        self.number = 0

    def agree_on_number(self) -> None:
        """Give these models a number that no others of the group have: they may look alike.

        Collective:
            Every rank. One small exchange.
        """
        global _last_number
        # A process that has joined later has made fewer.
        self.number = _last_number = 1 + max(self.group.exchange(_last_number))

    def reset(self) -> None:
        """Forget all plans: the group has ranks now that know of none."""
        self._plans = _Plans()
        self._plan = self._seen = None
        self._is_open = False

    def compare_collective(self, name: str, size: int) -> None:
        """Compare before a collective of torch's own, see `compare`.

        Args:
            name: one of `COLLECTIVES`.
            size: elements of its tensors.
        """
        self.compare(UnitAction(_OTHERS + COLLECTIVES.index(name), size=size))

    def before_other_collective(self) -> None:
        """Called before each collective of the group that is no unit's: no plan holds such a one.

        Collective:
            As `compare`, if this rank follows a plan.
        """
        if self._is_own:
            return
        if self._plan is not None:
            self.compare(UnitAction(_ELSEWHERE))
        elif self._seen is not None:
            self._plans.lose_track()
            self._seen = None

    @contextmanager
    def own_collective(self) -> Iterator[None]:
        """Inside, the group's collectives are those that were compared."""
        before, self._is_own = self._is_own, True
        try:
            yield
        finally:
            self._is_own = before

    def end_round(self, told: Sequence[Any]) -> list[list[Any]]:
        """Return what every rank has `told`, by rank, once all have ended their backward.

        Gradient:
            None: metadata only.

        Collective:
            As `compare`; it always blocks.

        Raises:
            As `compare`.
        """
        return self._compare(UnitAction(ROUND), told)

    def compare(self, action: UnitAction) -> None:
        """Return once every rank is about to do the same, or has said that it will.

        Gradient:
            None: metadata only.

        Collective:
            Every rank, same order. Where no plan holds the action it blocks, for one small
            all-gather; where this rank leaves a plan, after the collectives that the plan has left.

        Raises:
            UnitOrderError: on every rank, if one is about to do something else.
            PeerLostError: another rank went away.
        """
        self._compare(action, [])

    def _compare(self, action: UnitAction, told: Sequence[Any]) -> list[list[Any]]:
        left = -1
        if self._plan is not None:
            if action == self._plan.actions[self._place]:
                self._place += 1
                if action.what != ROUND:
                    return []
            else:
                left = self._leave_plan()
        is_first = not self._is_open and action.what == GATHER and self.may_begin_step
        plan = self._plans.expected(action) if is_first else None
        digest = 0 if plan is None else plan.digest
        row = [action.what, action.unit, action.size, self.step(), left, self.number]
        try:
            with self.own_collective():
                # As other values that ranks exchange: what meets them is refused, and no crash.
                everyone = self.group.exchange([*row, is_first, digest, told])
            if any(not isinstance(one, list) or one[:_NUMBERS] != row for one in everyone):
                raise self._error(everyone)
        except BaseException:
            self.reset()
            raise
        if any(one[_NUMBERS] != is_first for one in everyone):
            is_first = False  # one rank evaluates what another one trains on, so far alike
        if any(one[_NUMBERS + 1] != digest for one in everyone):
            self._plans, plan = _Plans(), None
        self._note(action, plan, is_first=is_first)
        return [one[-1] for one in everyone]

    def _leave_plan(self) -> int:
        """Take part in what the plan has left before its end; the place where this rank left it."""
        assert self._plan is not None, "this rank follows it"
        place, plan = self._place, self._plan
        self._plan = self._seen = None
        self._plans.leave()
        for action in plan.actions[place:-1]:
            with self.own_collective():
                self.take_part(action)
        return place

    def _note(self, action: UnitAction, plan: Plan | None, *, is_first: bool) -> None:
        """Note an action that all ranks are about to take.

        Args:
            plan: what the step that begins with it is to follow.
            is_first: a step begins.
        """
        if is_first:
            self._is_open, self._seen = True, []
        if action.what == ROUND:
            if self._plan is not None:
                self._plans.follow(self._plan)
            elif self._seen is not None:
                self._plans.learn((*self._seen, action))
            self._plan = self._seen = None
            self._is_open = False
        elif plan is not None and is_first:
            self._plan, self._place = plan, 1
        elif action.what >= _ELSEWHERE:
            if self._is_open:
                self._plans.lose_track()
            self._seen = None
        elif self._seen is not None:
            self._seen.append(action)

    def _error(self, rows: list[Any]) -> UnitOrderError:
        told = [f"rank {rank} {self._describe(row, rows)}" for rank, row in enumerate(rows)]
        return UnitOrderError(
            "the ranks go through the units of a sharded model in different orders",
            where=self.group.place,
            expected="the same forwards and backwards, in one order, on every rank",
            got=first_of(told, 8, "; "),
            cause="a branch or a loop that depends on the rank or on its batch, a forward that one"
            " rank alone runs (an evaluation under `if rank == 0`), or parameters that one rank"
            " alone has frozen",
            fix="run every unit on every rank (multiply its output by zero where it does not"
            ' count); or register(shard="whole")',
        )

    def _describe(self, row: Any, rows: list[Any]) -> str:
        is_known = all(isinstance(each, list) and len(each) == _NUMBERS + 3 for each in rows)
        if not is_known:
            return "is elsewhere" if not isinstance(row, list) else f"is at {row}"
        what, unit, size, step, left, number = row[:_NUMBERS]
        if what in _WORDS:
            told = _WORDS[what].format(unit=f"`{self._names[unit]}`")
        elif what == _ELSEWHERE:
            told = "communicates something else"
        else:
            told = f"calls {COLLECTIVES[what - _OTHERS]} ({size} elements)"
        if left >= 0:
            told += " where earlier steps did not"
        if any(other[:2] != row[:2] or other[4] != left for other in rows):
            return told
        if any(other[5] != number for other in rows):
            return f"{told} of the models in its sync number {number}"
        if any(other[3] != step for other in rows):
            return f"{told}, in another step" if step != rows[0][3] else f"{told}, in one step"
        return f"{told}: {size} elements"


class _Plans:
    """The orders in which steps have gone, by the order of the step before.

    A program may take turns, as two networks that train against each other do. All ranks have gone
    the same ways, and so expect the same.
    """

    def __init__(self) -> None:
        self._after: dict[int, Plan] = {}  # by the digest of the plan before; 0 for no plan
        self._last = 0
        self._num_followed = self._num_left = 0

    def expected(self, first: UnitAction) -> Plan | None:
        """The order that a step which begins with `first` is expected to take; None without one.

        To leave a plan costs the collectives that it has left: a program that does so often had
        better compare.
        """
        is_too_often = self._num_left * _FOLLOWED_FOR_EACH_LEFT > self._num_followed + _FREE
        plan = None if is_too_often else self._after.get(self._last)
        return plan if plan is not None and plan.actions[0] == first else None

    def learn(self, actions: tuple[UnitAction, ...]) -> None:
        """Note in which order a step has gone, on all ranks."""
        if len(self._after) >= _MOST_PLANS:
            self._after.clear()
        plan = Plan(actions, zlib.crc32(repr(actions).encode()))
        self._after[self._last] = plan
        self._last = plan.digest

    def follow(self, plan: Plan) -> None:
        """Note that a step has gone as it was expected to."""
        self._num_followed += 1
        self._last = plan.digest

    def leave(self) -> None:
        """Note that a step has not gone as it was expected to."""
        self._num_left += 1
        self._after.pop(self._last, None)
        self._last = 0

    def lose_track(self) -> None:
        """Note that a step goes in an order that no plan can hold."""
        self._last = 0
