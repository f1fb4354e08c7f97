# SPDX-License-Identifier: Apache-2.0
"""`ThreadLimit`: the number of torch's threads while workers live that ask for one.

Trainers in one process may overlap (a notebook makes the next one before it closes the last one):
the first worker notes the number that the program had, and the last one restores it.
"""

from __future__ import annotations

import threading

import torch

_lock = threading.Lock()
_holders: set[ThreadLimit] = set()
_before = 1


class ThreadLimit:
    """One worker's claim on the number of threads."""

    def set(self, threads: int) -> None:
        global _before
        with _lock:
            if not _holders:
                _before = torch.get_num_threads()
            _holders.add(self)
            torch.set_num_threads(threads)

    def release(self) -> None:
        """Give the claim up, if there is one; the last one restores the program's number."""
        with _lock:
            if self in _holders:
                _holders.discard(self)
                if not _holders:
                    torch.set_num_threads(_before)
