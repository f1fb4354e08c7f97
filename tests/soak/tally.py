# SPDX-License-Identifier: Apache-2.0
"""Programs by the thousand: counted, and the failing ones made small and written down."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soak import scripts
from soak.drawing import named
from soak.judging import OUTCOMES, Outcome
from soak.pool import Member
from soak.running import source_of
from soak.shrinking import shrunk
from soak.spec import Spec

_SIMPLEST = Spec(model="linear", way="equal", optimizer="sgd").pieces()


def _place(spec: Spec) -> str:
    """Where it ran, for the tables."""
    if "strikes" in spec.options:
        return f"ray, {spec.sync}"
    return f"trainer, {spec.sync}" if "loop" in spec.options else spec.sync


class Soak:
    """One run of many programs.

    Args:
        fixed: fields of every spec.
        folder: where scripts of failures go.
        shrinks: whether failures are made small.
        on_ray: the share of the time that goes to programs on real Ray.

    Attributes:
        ends_with_first: no further program is begun when one has failed.
    """

    ends_with_first = False

    def __init__(
        self, fixed: dict[str, Any], folder: Path, *, shrinks: bool, on_ray: float
    ) -> None:
        self._fixed, self._folder, self._shrinks = fixed, folder, shrinks
        self._on_ray = on_ray
        self._lock = threading.Lock()
        self._table: Counter[tuple[str, str]] = Counter()
        self._causes: Counter[tuple[str, str, frozenset[str]]] = Counter()
        self._discarded: Counter[str] = Counter()
        self._found: dict[tuple[str, str], Path] = {}
        self._codes: Counter[str] = Counter()

    def run(self, seed: int, seconds: float | None, count: int | None, processes: int) -> int:
        """Programs SEED:0, SEED:1, ... until the time or the count is over; 1 if any failed."""
        started = time.monotonic()
        deadline = started + seconds if seconds is not None else None
        numbers = iter(range(count)) if count is not None else itertools.count()
        names = (f"{seed}:{number}" for number in numbers)
        threads = [
            threading.Thread(target=self._work, args=(names, deadline)) for _ in range(processes)
        ]
        if self._on_ray:
            threads.append(threading.Thread(target=self._work_on_ray, args=(seed, deadline)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._report(time.monotonic() - started)
        return int(self._has_failed())

    def _has_failed(self) -> bool:
        with self._lock:
            return any(kind not in ("exact", "refused") for _, kind in self._table)

    def alone(self, name: str, spec: Spec | None) -> int:
        """One program, with its text."""
        spec = named(name, **self._fixed) if spec is None else spec
        member = Member()
        print(spec.to_json(), source_of(spec), sep="\n\n")
        outcome = member.run(spec)
        print(outcome.kind, outcome.what, outcome.text)
        if outcome.fails:
            self._make_small(name, spec, outcome, member)
        member.leave()
        return int(outcome.fails)

    def _work(self, names: Iterator[str], deadline: float | None) -> None:
        member = Member()
        while deadline is None or time.monotonic() < deadline:
            if self.ends_with_first and self._has_failed():
                break
            with self._lock:
                name = next(names, None)
            if name is None:
                break
            self._try(name, member)
        member.leave()

    def _work_on_ray(self, seed: int, deadline: float | None) -> None:
        """One after the other, and breaks between them, for the share to come out right."""
        member = Member()
        for number in itertools.count():
            started = time.monotonic()
            if deadline is None or started > deadline:
                break
            if self.ends_with_first and self._has_failed():
                break
            self._try(f"{seed}:ray{number}", member)
            used = time.monotonic() - started
            time.sleep(min(used * (1 / self._on_ray - 1), max(0.0, deadline - time.monotonic())))
        member.leave()

    def _try(self, name: str, member: Member) -> None:
        spec = named(name, **self._fixed)
        outcome = member.run(spec)
        if outcome.fails and not self._is_known(spec, outcome) and self._shrinks:
            again = member.run(spec)
            if not again.fails:
                print(f"{name}: {outcome.kind} once, then {again.kind}", outcome.text, flush=True)
            self._make_small(name, spec, again if again.fails else outcome, member)
        self._count(spec, outcome)

    def _count(self, spec: Spec, outcome: Outcome) -> None:
        with self._lock:
            if outcome.kind == "discarded":
                self._discarded[outcome.what[:60]] += 1
                return
            self._table[_place(spec), outcome.kind] += 1
            if outcome.kind == "refused":
                self._codes[outcome.what] += 1

    def _is_known(self, spec: Spec, outcome: Outcome) -> bool:
        """It fails as another one did, and has in it what was left of that one."""
        pieces = spec.pieces()
        with self._lock:
            for kind, what, cause in self._causes:
                if (kind, what) == (outcome.kind, outcome.what) and cause <= pieces:
                    self._causes[kind, what, cause] += 1
                    return True
            if not self._shrinks:
                self._causes[outcome.kind, outcome.what, frozenset({_place(spec)})] += 1
        return False

    def _make_small(self, name: str, spec: Spec, outcome: Outcome, member: Member) -> None:
        is_slow = "strikes" in spec.options
        small = spec if is_slow else shrunk(spec, outcome, member.run)
        last = outcome if is_slow else member.run(small)
        body = source_of(small)
        cause = frozenset(small.pieces() - _SIMPLEST)
        with self._lock:
            self._causes[outcome.kind, outcome.what, cause] += 1
            is_new = (small.sync, body) not in self._found
            if is_new:
                file = f"{outcome.kind}-{name.replace(':', '-').replace('/', '-')}"
                self._found[small.sync, body] = scripts.write(self._folder, file, small, last)
        where = self._found[small.sync, body]
        print(f"{name}: {outcome.kind}, {outcome.what} ({small.sync}): {where}", flush=True)
        if is_new:
            first = last.text.strip().splitlines()[:1]
            print(*first, body, sep="\n", flush=True)

    def _report(self, seconds: float) -> None:
        total = sum(self._table.values())
        print(f"\n{total} programs in {seconds:.0f} s, {total / seconds:.1f} a second; besides")
        print(f"{sum(self._discarded.values())} that fail in one process as well")
        print(f"\n{'':26}" + "".join(f"{kind:>13}" for kind in OUTCOMES))
        for sync in sorted({sync for sync, _ in self._table}):
            counts = "".join(f"{self._table[sync, kind]:>13}" for kind in OUTCOMES)
            print(f"{sync:26}{counts}")
        print("\nrefused as:", ", ".join(f"{c} {n}" for c, n in sorted(self._codes.items())))
        for (kind, what, cause), number in self._causes.most_common():
            print(f"{number:6} {kind}, {what}: {', '.join(sorted(cause)) or 'whatever'}")
        for what, number in self._discarded.most_common(8):
            print(f"{number:6} discarded: {what}")
