# SPDX-License-Identifier: Apache-2.0
"""What one rank saw. Written while it trains, compared with the others' afterwards.

Nothing is communicated while a program is watched: each rank keeps its own ledger, and what
happened in which step is keyed so that ledgers can be laid side by side (`lockstep.audit.world`).
So the audit cannot hang a program, take part in its deadlock or disturb the order of its
collectives, and one rank that does something else than its peers is simply seen.

A ledger stays small: `is_detailed` keeps the first steps and then fewer and fewer, the same
ones on every rank. Replicas that drifted apart stay apart, so a later look still finds it.

As a file it is replaced as a whole while its rank trains on.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit import facts
from lockstep.audit.facts import ProcessFacts
from lockstep.audit.finding import Place
from lockstep.audit.prints import Fingerprint, Sketch

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.audit.facts import (
        Collective,
        Evaluation,
        Failure,
        Loading,
        Permutation,
        Step,
        Track,
        UsedBuffers,
    )

FIRST_STEPS: Final = 64
"""This many steps are kept whole in `full` mode, then one each time that a run has doubled;
`benchmarks/audit.py` measures what they cost."""

FIRST_STEPS_WATCH: Final = 8

MODELS_SENT: Final = 64
"""So many messages as large as a model are written down."""

REDUCING: Final = ("all_reduce", "reduce")
SCATTERING: Final = ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
"""Collectives that leave ranks a sum, and each a part of it."""
ADDING_UP: Final = (*REDUCING, *SCATTERING)
WITHOUT_NUMBERS: Final = (
    "all_gather_object",
    "barrier",
    "broadcast_object_list",
    "gather_object",
    "monitored_barrier",
    "scatter_object_list",
)
"""Collectives that no tensor passes through."""


def is_detailed(step: int, first: int, rarest: int | None = None) -> bool:
    """Is step `step`, from 0, one that is written down in detail?

    Args:
        first: so many are, one after the other.
        rarest: at least every `rarest`-th is, soon no others; None: they become rarer for ever.
    """
    if step < first:
        return True
    doublings: int = (step // first).bit_length()
    if rarest is None:
        return step % max(1, (first << doublings) // 2) == 0
    # Twice as fast: a run that is watched to its end pays for each of them.
    return step % min(1 << 2 * doublings, rarest) == 0


def thin_out(steps: list[Step], keep: int) -> None:
    """Leave every second step out when there are more than `keep`; the first and the last stay.

    The same ones on every rank that wrote down the same steps.
    """
    if len(steps) > keep:
        head = keep // 4
        steps[head:-1] = steps[head:-1:2]


@dataclass
class Ledger:
    """Everything that one rank saw."""

    rank: int = 0
    world_size: int = 1
    started_group: bool = False
    tracks: list[Track] = field(default_factory=list)
    loadings: list[Loading] = field(default_factory=list)
    permutations: list[Permutation] = field(default_factory=list)
    facts: ProcessFacts = field(default_factory=ProcessFacts)
    calls: list[Collective] = field(default_factory=list)
    calls_made: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)
    buffers_used: list[UsedBuffers] = field(default_factory=list)
    failure: Failure | None = None
    stack: list[Place] = field(default_factory=list)
    stuck_in: Collective | None = None
    exit_code: int | None = None
    failed_at: float | None = None

    @property
    def standing(self) -> str:
        """``is in all_reduce at train.py:31 (call 12)``, or what it failed with and where."""
        stuck, failure = self.stuck_in, self.failure
        if stuck is not None:
            at = f" at {stuck.where[0].at}" if stuck.where else ""
            verb = "failed in" if failure is not None else "is in"
            return f"{verb} {stuck.op}{at} (its collective {self.calls_made})"
        at = f" at {self.stack[0].at}" if self.stack else ""
        if failure is not None:
            return f"raised {failure.type}{at}"
        if self.exit_code is not None:
            return f"ended with code {self.exit_code} after {self.calls_made} collectives"
        return f"is{at} after {self.calls_made} collectives"

    def to_bytes(self) -> bytes:
        """JSON: what a rank writes is read by another process, and must not run code there."""
        return json.dumps(_packed(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """The inverse of `to_bytes`."""
        ledger = _unpacked(json.loads(data))
        assert isinstance(ledger, cls)
        return ledger


_CLASSES: Final[dict[str, Any]] = {
    c.__name__: c
    for c in (*vars(facts).values(), Place, Fingerprint, Sketch, Ledger)
    if isinstance(c, type) and is_dataclass(c)
}
_ARRAYS: Final = {"hashes": np.int64, "norms": np.float64, "samples": np.float64}
"""The fields of a `Fingerprint` and of a `Sketch`, and what their numbers are."""


def _packed(value: Any) -> Any:
    kind = type(value).__name__
    if kind in _CLASSES:
        return {"~": kind, **{f.name: _packed(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, np.ndarray):
        # Bytes as base64: JSON's numbers would lose infinities and take four times the room.
        return base64.b64encode(value.tobytes()).decode()
    if isinstance(value, dict):
        return {str(name): _packed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(item) for item in value]
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = _CLASSES.get(value.pop("~", ""))
    if kind in (Fingerprint, Sketch):
        return kind(**{name: _array(name, data) for name, data in value.items()})
    # A ledger that was recorded earlier may tell more.
    known = value if kind is None else {f.name for f in fields(kind)}
    filled = {name: _unpacked(item) for name, item in value.items() if name in known}
    return filled if kind is None else kind(**filled)


def _array(name: str, data: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(data), dtype=_ARRAYS[name])


_TRIES = 5


class LedgerFile:
    """Where one process writes its ledger, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = threading.Lock()

    def write(self, ledger: Ledger) -> None:
        """All or nothing. The program may change the ledger meanwhile.

        A full disk is the audit's trouble and not the program's: an empty file stays, of which the
        launcher says that the rank could not be compared.
        """
        with self._writing:
            for left in reversed(range(_TRIES)):
                try:
                    data = ledger.to_bytes()
                except RuntimeError:  # something was added while it was read
                    if not left:
                        return
                    continue
                partial = self.path.with_suffix(".partial")
                try:
                    partial.write_bytes(data)
                    partial.replace(self.path)
                except OSError:
                    with contextlib.suppress(OSError):
                        partial.unlink(missing_ok=True)
                        self.path.write_bytes(b"")  # an older ledger is not what the rank saw
                return


def read_ledger(path: Path) -> Ledger | None:
    """The ledger in the file at `path`; None if there is none that is whole."""
    try:
        return Ledger.from_bytes(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError):
        return None
