# SPDX-License-Identifier: Apache-2.0
"""What a rule is: a pure function of what all ranks saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lockstep.audit.finding import Finding, Place, Severity, with_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

    Look = Callable[[SharedTrack, int], Finding | None]


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
        evidence: dict[str, Any] | None = None,
        **details: Any,
    ) -> Finding:
        """One finding of this code; `details` are `Finding`'s fields.

        What `evidence` holds by rank is held by the rank's number as text, as JSON has it.
        """
        return Finding(
            self.code,
            self.name,
            severity or self.severity,
            message,
            fix,
            evidence={name: _by_text(value) for name, value in (evidence or {}).items()},
            where=with_text(list(where)),
            **details,
        )


def _by_text(value: Any) -> Any:
    return {str(key): of_key for key, of_key in value.items()} if isinstance(value, dict) else value


def at_step(track: SharedTrack, number: int, **details: Any) -> dict[str, Any]:
    """What a finding of one step says, unless `details` say something else."""
    step = next(iter(track.steps(number).values()))
    optimizer = track.first.key_of_all
    told = {"rank": track.ranks, "step": number + 1, "where": step.where, "optimizer": optimizer}
    return {**told, **details}


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong.

    A rule says what it saw, never what it guesses; what it only suspects is a notice.

    Attributes:
        codes: those of its findings.
        look: yields what it finds, whatever others do: a pure function of the ledgers.
            `lockstep.audit.precedence` leaves out what another finding explains.
        unless: it has nothing to say where one of these is so.
    """

    codes: tuple[Code, ...]
    look: Callable[[World], Iterable[Finding]]
    unless: tuple[Callable[[World], bool], ...] = ()

    def judge(self, world: World) -> Iterable[Finding]:
        """What it finds."""
        return () if any(is_so(world) for is_so in self.unless) else self.look(world)


def each_step(
    codes: tuple[Code, ...], look: Look, unless: tuple[Callable[[World], bool], ...] = ()
) -> Rule:
    """Of each optimizer that several ranks have as one, what `look` finds in a step first."""
    return Rule(codes, lambda world: first_of_each(world.compared, look), unless)


def first_in(track: SharedTrack, look: Look) -> Finding | None:
    """What `look` finds in one of an optimizer's steps first: later steps repeat it."""
    return next((f for number in track.numbers if (f := look(track, number)) is not None), None)


def first_of_each(tracks: Iterable[SharedTrack], look: Look) -> Iterator[Finding]:
    """The same for several optimizers."""
    return filter(None, (first_in(track, look) for track in tracks))


def numbers(values: dict[int, float]) -> str:
    """``0.40 on rank 0, 0.19 on rank 1``; at most four ranks."""
    return by_rank({rank: f"{value:.6g}" for rank, value in values.items()})


def by_rank(values: dict[int, str]) -> str:
    """``bfloat16 on rank 0, float32 on rank 1``; at most four ranks."""
    shown = [f"{value} on rank {rank}" for rank, value in sorted(values.items())[:4]]
    return ", ".join(shown) + (", ..." if len(values) > 4 else "")


_NAMES_SHOWN: Final = 3


def named(names: list[str]) -> str:
    """```a`, `b`, `c` and 3 more``."""
    shown = ", ".join(f"`{name}`" for name in names[:_NAMES_SHOWN])
    further = len(names) - _NAMES_SHOWN
    return shown if further <= 0 else f"{shown} and {further} more"
