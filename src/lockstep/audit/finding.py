# SPDX-License-Identifier: Apache-2.0
"""One thing that the audit saw, under one rule."""

from __future__ import annotations

import contextlib
import linecache
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from lockstep.errors import AuditError

if TYPE_CHECKING:
    from collections.abc import Sequence

Severity = Literal["error", "warning", "notice"]
SEVERITIES: Final[tuple[Severity, ...]] = ("notice", "warning", "error")


@dataclass(frozen=True)
class Place:
    """A line of the program: ``file:line function`` and its text."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.at} {self.function}"

    @property
    def at(self) -> str:
        """``file:line``, short where the file lies below the working directory."""
        short = self.file
        with contextlib.suppress(OSError):  # the folder may have been deleted
            short = short.removeprefix(os.path.join(os.getcwd(), ""))
        return f"{short}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """What was seen, where, and what to type.

    Attributes:
        code: e.g. ``LS101``; ``lockstep explain LS101`` prints its page.
        name: the rule's name in words.
        severity: ``error``, ``warning`` or ``notice`` (a suspicion without a measurement).
        rank: the ranks that it concerns.
        step: the optimizer step, from 1, or None if it belongs to none.
        parameters: names in the user's model.
        evidence: the numbers, JSON-able.
        where: lines of the user's program, the most telling first.
        optimizer: the one that it concerns, by its key; "*": any of them; "": none.
        message: one or two sentences, with numbers.
        fix: what to type.
    """

    code: str
    name: str
    severity: Severity
    message: str
    fix: str
    rank: list[int] = field(default_factory=list)
    step: int | None = None
    parameters: list[str] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    where: list[Place] = field(default_factory=list)
    optimizer: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As the JSON report has it."""
        return asdict(self)


def is_at_least(severity: Severity, least: Severity) -> bool:
    """Is `severity` as grave as `least`?"""
    return SEVERITIES.index(severity) >= SEVERITIES.index(least)


def with_text(places: list[Place]) -> list[Place]:
    """The same places, with the text of their lines, and without repetitions."""
    seen: dict[tuple[str, int], Place] = {}
    for place in places:
        text = place.text or linecache.getline(place.file, place.line).strip()
        seen.setdefault(
            (place.file, place.line), Place(place.file, place.line, place.function, text)
        )
    return list(seen.values())


def audit_error(findings: Sequence[Finding]) -> AuditError:
    """The error that tells of `findings`, of which there is at least one; the first comes first."""
    first = findings[0]
    many = "rank" if len(first.rank) == 1 else "ranks"
    ranks = f"{many} {', '.join(map(str, first.rank))}" if first.rank else None
    step = f"step {first.step}" if first.step is not None else None
    named = ", ".join(f"`{name}`" for name in first.parameters[:4])
    more = f" and {len(first.parameters) - 4} more" if len(first.parameters) > 4 else ""
    lines = [f"{place}: {place.text}" for place in first.where[:3]]
    where = "; ".join(filter(None, (ranks, step, named + more if named else None)))
    further = [f"{f.code}: {f.message}" for f in findings[1:]]
    return AuditError(
        first.name,
        where="\n           ".join([where, *lines]) if lines else where,
        got="\n           ".join([first.message, *further]),
        fix=first.fix + f" (more: lockstep explain {first.code})",
        findings=tuple(findings),
    )
