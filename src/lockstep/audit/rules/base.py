# SPDX-License-Identifier: Apache-2.0
"""What a rule is: a pure function of what all ranks saw."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from lockstep.audit.finding import Finding, Place, Severity, with_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World


@dataclass(frozen=True)
class Code:
    """A code, its name in words, and how grave it is."""

    code: str
    name: str
    severity: Severity = "error"

    def finding(
        self,
        message: str,
        fix: str,
        *,
        where: Iterable[Place] = (),
        severity: Severity | None = None,
        **details: Any,
    ) -> Finding:
        """One finding of this code; `details` are `Finding`'s fields."""
        return Finding(
            self.code,
            self.name,
            severity or self.severity,
            message,
            fix,
            where=with_text(list(where)),
            **details,
        )


class Rule(Protocol):
    """One thing that can be wrong.

    A rule says what it saw, never what it guesses; what it only suspects is a notice.
    """

    @property
    def codes(self) -> tuple[Code, ...]: ...

    def judge(self, world: World) -> Iterable[Finding]:
        """Yield what this rule finds, whatever others do: a pure function of the ledgers.

        `lockstep.audit.precedence` leaves out what another finding explains.
        """
        ...


def first_of_each(
    tracks: Iterable[SharedTrack], look: Callable[[SharedTrack, int], Finding | None]
) -> Iterator[Finding]:
    """What `look` finds in each optimizer's steps, once: later steps repeat the first."""
    for track in tracks:
        found = next((f for n in track.numbers if (f := look(track, n)) is not None), None)
        if found is not None:
            yield replace(found, optimizer=track.key)


def numbers(values: dict[int, float]) -> str:
    """``0.40 on rank 0, 0.19 on rank 1``; at most four ranks."""
    shown = [f"{value:.6g} on rank {rank}" for rank, value in sorted(values.items())[:4]]
    return ", ".join(shown) + (", ..." if len(values) > 4 else "")


_NAMES_SHOWN: Final = 3


def named(names: list[str]) -> str:
    """```a`, `b`, `c` and 3 more``."""
    shown = ", ".join(f"`{name}`" for name in names[:_NAMES_SHOWN])
    further = len(names) - _NAMES_SHOWN
    return shown if further <= 0 else f"{shown} and {further} more"
