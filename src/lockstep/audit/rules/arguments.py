# SPDX-License-Identifier: Apache-2.0
"""One argument of a model that is the same on all ranks while another differs: drawn alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lockstep.audit.finding import Place
    from lockstep.audit.ledger import Step
    from lockstep.audit.shared_track import SharedTrack

_STEPS: Final = 3
_LOOKED_AT: Final = 16
_TARGET: Final = "the target of the loss"


@dataclass(frozen=True)
class Alike:
    """In so many forwards `same` was equal on all ranks, `size` numbers, and `other` was not."""

    same: str
    other: str
    size: int
    steps: list[int]
    where: list[Place]


@dataclass(frozen=True)
class _Forward:
    """What one forward was given, by name, and the line that called it."""

    given: dict[str, dict[str, Any]]
    where: list[Place]


def drawn_alike(track: SharedTrack) -> Alike | None:
    """The first argument that was new in every step, of no order, and equal on all ranks."""
    early = [number for number in track.numbers if number < _LOOKED_AT]
    by_step = {n: list(map(_forwards, track.steps(n).values())) for n in early}
    if any(len(of_ranks) < len(track.ranks) for of_ranks in by_step.values()):
        return None
    most = min((len(x) for of_ranks in by_step.values() for x in of_ranks), default=0)
    for place in range(most):
        seen = {n: [of_rank[place] for of_rank in of_ranks] for n, of_ranks in by_step.items()}
        whole = {n: ranks for n, ranks in seen.items() if all(f.given for f in ranks)}
        found = _at_one_place(whole) if len(whole) >= _STEPS else None
        if found is not None:
            return found
    return None


def _forwards(step: Step) -> list[_Forward]:
    """Of the wrapper; where there is none, of the first module that was called."""
    calls = step.inputs or [{"arguments": step.fed_arguments, "where": step.fed_where}]
    backwards = [b for b in step.backwards if b.kind == "backward"]
    found = []
    for place, call in enumerate(calls):
        given = {f"argument {k + 1} of the model": a for k, a in enumerate(call["arguments"])}
        if len(backwards) == len(calls) and backwards[place].targets:
            given[_TARGET] = backwards[place].targets[0]
        found.append(_Forward(given, call["where"]))
    return found


def _at_one_place(seen: dict[int, list[_Forward]]) -> Alike | None:
    names = list(next(iter(seen.values()))[0].given)
    if any(list(forward.given) != names for ranks in seen.values() for forward in ranks):
        return None
    table = {name: [[f.given[name] for f in ranks] for ranks in seen.values()] for name in names}
    differ = [name for name in names if name != _TARGET and all(map(_all_differ, table[name]))]
    for same in names:
        hashes = {ranks[0]["hash"] for ranks in table[same]}
        if len(hashes) < max(_STEPS, len(seen)) or not all(map(_are_equal, table[same])):
            continue
        rows = [ranks[0]["rows"] for ranks in table[same]]
        for other in differ:
            if rows == [ranks[0]["rows"] for ranks in table[other]]:
                size = table[same][0][0]["size"]
                return Alike(same, other, size, list(seen), next(iter(seen.values()))[0].where)
    return None


def _are_equal(ranks: list[dict[str, Any]]) -> bool:
    return len({a["hash"] for a in ranks}) == 1 and all(a["scattered"] for a in ranks)


def _all_differ(ranks: list[dict[str, Any]]) -> bool:
    return len({a["hash"] for a in ranks}) == len(ranks)
