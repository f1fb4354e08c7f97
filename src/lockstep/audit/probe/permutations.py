# SPDX-License-Identifier: Apache-2.0
"""The orders that the program draws for its data with numpy's and Python's own generators.

Not with torch's: compilers recognise ``torch.randperm`` by its identity, and whether the program
compiles is not known when it would have to be replaced. Nor where numba, which recognises the
others so, was there before.
"""

from __future__ import annotations

import random
import sys
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.facts import Permutation
from lockstep.audit.probe.frames import users_lines

if TYPE_CHECKING:
    from lockstep.audit.probe.probe import Probe

_LOOKED_AT: Final = 256
_NUMBERS: Final = 4096
_OF_A_NAME: Final = 64


def install(probe: Probe) -> None:
    """Watch ``numpy.random.permutation``, and ``shuffle`` of both."""
    if "numba" in sys.modules:
        return
    for module, name, look in (
        (np.random, "permutation", _note_permutation),
        (np.random, "shuffle", _note_shuffle),
        (random, "shuffle", _note_shuffle),
    ):
        probe.patches.wrap(module, name, probe.afterwards(look))
        watched = getattr(module, name)
        watched.__module__, watched.__qualname__ = module.__name__, name  # where a pickle looks


def _note_permutation(probe: Probe, drawn: Any, *_: Any) -> None:
    _note(probe, drawn)


def _note_shuffle(probe: Probe, _: None, args: Any, __: Any) -> None:
    _note(probe, args[0] if args else None)


def _note(probe: Probe, order: Any) -> None:
    known = probe.ledger.permutations
    if not probe.is_on or probe.is_elsewhere() or len(known) >= _LOOKED_AT:
        return
    seen = _some_of(order)
    where = users_lines()
    if seen and where:
        known.append(Permutation(where, len(order), zlib.crc32(seen), probe.steps_done))


def _some_of(order: Any) -> bytes:
    """Bytes that stand for it; none where it holds objects, or is of a class of the program's."""
    if type(order) is np.ndarray and not order.dtype.hasobject and order.ndim:
        first_of_each_row: Any = (slice(_NUMBERS), *[0] * (order.ndim - 1))
        return order[first_of_each_row].tobytes() if order.size else b""
    if type(order) is not list or not all(type(x) in (int, str) for x in order[:_NUMBERS]):
        return b""
    short = [x[:_OF_A_NAME] if isinstance(x, str) else x for x in order[:_NUMBERS]]
    return repr(short).encode()
