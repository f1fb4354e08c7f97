# SPDX-License-Identifier: Apache-2.0
"""What the generators of a loader's worker begin with, and whether its samples draw from them.

Those of torch, numpy and `random`, which a loader seeds; and those that the dataset holds, of which
each worker has got a copy.

Runs in the workers, which may import this anew: a few standard modules. A worker writes numbers
into memory that it shares with its rank; nothing else in it is changed once its first batch is
read.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from lockstep.audit.facts import WorkerDraws
from lockstep.audit.finding import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS: Final = ("torch", "numpy", "random")
_STATES: Final = len(KINDS) + 1
"""One of each kind, and one of all that the dataset holds."""
_WIDTH: Final = 1 + 2 * _STATES
_BEGUN, _READ = 1, 2
_CHANGED: Final = 4
"""The first of so many bits, one for each kind."""
_LOADS: Final = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME")


class SeenInit:
    """Stands in for a loader's ``worker_init_fn`` while its workers are started.

    Args:
        original: what the program gave the loader, if anything.
        memory: shared integers, `room_for` as many as there are workers.
    """

    def __init__(self, original: Callable[[int], Any] | None, memory: Any) -> None:
        self.original = original
        self.memory = memory

    def __call__(self, worker: int) -> Any:
        before: list[int] = []
        with suppress(Exception):
            before = _states()
        result = self.original(worker) if self.original is not None else None
        with suppress(Exception):
            self._note_begun(worker * _WIDTH, before)
        return result

    def _note_begun(self, start: int, before: list[int]) -> None:
        after = _states()
        bits = [_CHANGED << k for k, state in enumerate(before) if after[k] != state]
        self.memory[start + 1 : start + 1 + _STATES] = after
        self.memory[start] = _BEGUN + sum(bits)
        _look_at_first_batch(functools.partial(self._note_read, start))

    def _note_read(self, start: int) -> None:
        with suppress(Exception):
            self.memory[start + 1 + _STATES : start + _WIDTH] = _states()
            self.memory[start] += _READ


def room_for(workers: int) -> int:
    """How many shared integers that many workers write."""
    return workers * _WIDTH


def drawn_by_workers(memory: Any) -> list[WorkerDraws | None]:
    """What each worker has written; None for one that has not begun."""
    numbers = list(memory)
    found: list[WorkerDraws | None] = []
    for start in range(0, len(numbers), _WIDTH):
        flags, *states = numbers[start : start + _WIDTH]
        if not flags & _BEGUN:
            found.append(None)
            continue
        changed = [kind for k, kind in enumerate(KINDS) if flags & _CHANGED << k]
        after = states[_STATES:] if flags & _READ else []
        began = dict(zip(KINDS, states, strict=False))
        held = [states[_STATES - 1], *after[-1:]]
        found.append(WorkerDraws(changed, began, dict(zip(KINDS, after, strict=False)), held))
    return found


def _states() -> list[int]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kept = (
        torch.get_rng_state().numpy().tobytes() if torch is not None else b"",
        repr(_of_numpy(numpy)).encode() if numpy is not None else b"",
        repr(random.getstate()).encode(),
        b"".join(_of_held_generators()),
    )
    return [zlib.crc32(state) for state in kept]


def _of_numpy(numpy: Any) -> tuple[Any, ...]:
    _, keys, *place = numpy.random.get_state(legacy=True)
    return (keys.tobytes(), *place)


def _of_held_generators() -> Iterator[bytes]:
    """The states of the generators that this worker's dataset holds, if there are any."""
    from torch.utils.data import get_worker_info

    from lockstep.held_generators import generators_in

    info = get_worker_info()
    for held in generators_in(*(() if info is None else (info.dataset,))).values():
        state = held.get()
        yield repr(state.tolist() if hasattr(state, "tolist") else state).encode()


def _look_at_first_batch(look: Callable[[], None]) -> None:
    """Call `look` between the samples of this worker's first batch and what collates them.

    Ranks may agree on a size for a whole batch on purpose; a sample's own numbers are its own.
    """
    from torch.utils.data import _DatasetKind

    kinds: Any = _DatasetKind
    make = kinds.create_fetcher

    def made(*args: Any, **kwargs: Any) -> Any:
        kinds.create_fetcher = staticmethod(make)
        fetcher = make(*args, **kwargs)
        collate = getattr(fetcher, "collate_fn", None)
        if collate is None:
            return fetcher

        def collated(samples: Any) -> Any:
            fetcher.collate_fn = collate
            look()
            return collate(samples)

        fetcher.collate_fn = collated
        return fetcher

    kinds.create_fetcher = staticmethod(made)


def places_of(function: Any) -> list[Place]:
    """The lines of a function that seed, by what they call, and where it begins."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    lines = [
        i.positions.lineno
        for i in dis.get_instructions(code)
        if i.opname in _LOADS and "seed" in str(i.argval) and "initial" not in str(i.argval)
        if i.positions is not None and i.positions.lineno is not None
    ]
    lines = list(dict.fromkeys(lines))[:3]
    return [Place(code.co_filename, n, code.co_name, "") for n in (*lines, code.co_firstlineno)]
