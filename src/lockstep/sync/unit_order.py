# SPDX-License-Identifier: Apache-2.0
"""`UnitOrder`: compares, before each collective of a sharded model, what the ranks are about to do.

A gather of one layer that meets a gather of another layer fills it with the other's weights where
their sizes are equal, and hangs where they are not. So four integers go ahead of each collective,
on the CPU, and every rank raises the same error where they differ, before a weight or a gradient
has moved. Rejected: the integers inside the payload itself (payloads of unequal size hang), and one
comparison of the whole order at the end of a step (a hang comes before it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lockstep._torch_compat.fully_shard import COLLECTIVES
from lockstep.errors import UnitOrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.group import Group

GATHER: Final = 0
REDUCE: Final = 1
ROUND: Final = 2

_WORDS: Final = {
    GATHER: "gathers the weights of {unit}",
    REDUCE: "reduces the gradients of {unit}",
    ROUND: "has ended its backward",
}
_OTHERS: Final = len(_WORDS)
_NUMBERS: Final = 4


class UnitOrder:
    """The comparisons of one rank.

    Args:
        group: the ranks; its metadata has to travel on the CPU.
        names: of the units, by number.

    Attributes:
        group: the same.
        step: tells the number of this rank's step: a forward of another step gathers weights of
            another step.
    """

    def __init__(self, group: Group, names: Sequence[str]) -> None:
        self.group = group
        self._names = list(names)
        self.step: Callable[[], int] = lambda: 0

    def compare_collective(self, name: str, size: int) -> None:
        """Compare before a collective of torch's own, see `compare`.

        Args:
            name: one of `COLLECTIVES`.
            size: elements of its tensors.
        """
        self.compare(_OTHERS + COLLECTIVES.index(name), size=size)

    def compare(self, what: int, unit: int = 0, size: int = 0) -> None:
        """Say what this rank does next; return once every rank is about to do the same.

        Args:
            what: GATHER, REDUCE or ROUND.
            unit: its number.
            size: elements that this rank sends.

        Gradient:
            None: metadata only.

        Collective:
            Every rank, same order. Blocks. One small all-gather.

        Raises:
            UnitOrderError: on every rank, if one is about to do something else.
            PeerLostError: another rank went away.
        """
        # As other values that ranks exchange: what meets such a one is refused, too, and no crash.
        everyone = self.group.exchange([what, unit, size, self.step()])
        if any(one != everyone[0] for one in everyone):
            raise self._error(everyone)

    def _error(self, rows: list[Any]) -> UnitOrderError:
        told = [f"rank {rank} {self._describe(row, rows)}" for rank, row in enumerate(rows)]
        return UnitOrderError(
            "the ranks go through the units of a sharded model in different orders",
            where=self.group.place,
            expected="the same forwards and backwards, in one order, on every rank",
            got="; ".join(told[:8]) + (f"; and {len(told) - 8} more" if len(told) > 8 else ""),
            cause="a branch or a loop that depends on the rank or on its batch, a forward that one"
            " rank alone runs (an evaluation under `if rank == 0`), or parameters that one rank"
            " alone has frozen",
            fix="run every unit on every rank (multiply its output by zero where it does not"
            ' count); or register(shard="whole")',
        )

    def _describe(self, row: Any, rows: list[Any]) -> str:
        is_known = all(isinstance(each, list) and len(each) == _NUMBERS for each in rows)
        if not is_known:
            return "is elsewhere" if not isinstance(row, list) else f"is at {row}"
        what, unit, size, step = row
        if what in _WORDS:
            told = _WORDS[what].format(unit=f"`{self._names[unit]}`")
        else:
            told = f"calls {COLLECTIVES[what - _OTHERS]} ({size} elements)"
        if any(other[:2] != row[:2] for other in rows):
            return told
        if any(other[3] != step for other in rows):
            return f"{told}, in another step" if step != rows[0][3] else f"{told}, in one step"
        return f"{told}: {size} elements"
