# SPDX-License-Identifier: Apache-2.0
"""Exchanges of gradients that a backward will make, so that no bucket leaves before them."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.group import Group


class ExpectedExchange:
    """An upcoming exchange of gradients between the ranks of `group`, in a backward.

    While an exchange is expected, no bucket may leave: where ranks run their backwards differently
    (a rank without samples reduces nothing before its backward has ended), one rank's bucket
    would meet another rank's exchange. The autograd graph keeps this object alive.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        with _expected_exchanges_lock:
            _expected_exchanges.add(self)

    def finish(self) -> None:
        """Note that the backward has communicated."""
        with _expected_exchanges_lock:
            _expected_exchanges.discard(self)


_expected_exchanges: weakref.WeakSet[ExpectedExchange] = weakref.WeakSet()
_expected_exchanges_lock = threading.Lock()


def is_exchange_expected(group: Group) -> bool:
    """Whether a graph is alive whose backward will communicate on `group`."""
    if not _expected_exchanges:
        return False
    with _expected_exchanges_lock:
        return any(one.group.is_same_as(group) for one in _expected_exchanges)
