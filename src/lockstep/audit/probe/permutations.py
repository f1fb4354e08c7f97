# SPDX-License-Identifier: Apache-2.0
"""The orders that the program draws for its data with numpy's and Python's own generators.

Not with torch's: ``torch.randperm`` is an operator that compilers know by its identity, and has to
be replaced before the first batch, long before it is known whether the program compiles.
"""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lockstep.audit.facts import Permutation
from lockstep.audit.probe.frames import users_lines

if TYPE_CHECKING:
    from lockstep.audit.probe.probe import Probe

_LOOKED_AT: Final = 256
_NUMBERS: Final = 4096


def install(probe: Probe) -> None:
    """Watch ``numpy.random.permutation``, and ``shuffle`` of both."""
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
    if isinstance(order, np.ndarray) and not order.dtype.hasobject and order.ndim:
        seen = order[:_NUMBERS].tobytes()
    elif isinstance(order, list) and all(isinstance(x, int | str) for x in order[:_NUMBERS]):
        seen = repr(order[:_NUMBERS]).encode()
    else:
        return
    where = users_lines()
    if where:
        known.append(Permutation(where, len(order), zlib.crc32(seen), probe.steps_done))
