# SPDX-License-Identifier: Apache-2.0
"""`ThreadLimit`: the number of torch's threads while workers live that ask for one.

Trainers in one process may overlap (a notebook makes the next one before it closes the last one):
the first worker notes the number that the program had, and the last one restores it.
"""

from __future__ import annotations

import threading
import weakref

import torch

_lock = threading.Lock()
_before = 1
# Weakly: a trainer that nobody shuts down keeps no claim.
_holders: weakref.WeakSet[ThreadLimit] = weakref.WeakSet()


class ThreadLimit:
    """One worker's claim on the number of threads."""

    def __init__(self) -> None:
        self._threads = 1

    def set(self, threads: int) -> None:
        global _before
        with _lock:
            if not _holders:
                _before = torch.get_num_threads()
            _holders.add(self)
            self._threads = threads
            torch.set_num_threads(threads)

    def release(self) -> None:
        """Give the claim up, if there is one; the last one restores the program's number."""
        with _lock:
            if self in _holders:
                _holders.discard(self)
                left = [each._threads for each in _holders]
                torch.set_num_threads(left[0] if left else _before)
