# SPDX-License-Identifier: Apache-2.0
"""A small sum over few ranks: an all-gather of the parts, which each rank then adds up.

Over sockets the number of messages that follow one another takes the time of a small sum, and not
their bytes: a ring all-reduce of N ranks takes 2 (N - 1) messages, an all-gather N - 1.

Rejected: a message to and from each rank (``send`` and ``recv``). That is faster still, by 0.1 ms,
but in one of a hundred failures a rank did not hear that its peer had closed the connection.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_MOST_BYTES: Final = 1 << 19
"""The size of all parts together above which the smaller pieces of an all-reduce win."""
_MOST_RANKS: Final = 4


def is_quicker_gathered(tensor: torch.Tensor, size: int) -> bool:
    """Whether `size` ranks add up tensors like this one faster when each rank has all parts."""
    return (
        1 < size <= _MOST_RANKS
        and tensor.numel() > 1
        and tensor.numel() * tensor.element_size() * size <= _MOST_BYTES
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and tensor.dim() == 1
    )


class GatheredSum:
    """A sum whose parts are being gathered; has the ``wait`` of torch's ``Work``.

    Args:
        work: of the all-gather.
        parts: the tensors of all ranks, by rank; filled when `work` is done.
        total: receives the sum.
    """

    def __init__(self, work: Any, parts: torch.Tensor, total: torch.Tensor) -> None:
        self._work = work
        self._parts = parts
        self._total = total

    def wait(self) -> None:
        """Wait for the all-gather, and add.

        Raises:
            RuntimeError: a peer went away, or did not come within the group's timeout.
        """
        try:
            self._work.wait()
        finally:
            self._work = None  # a traceback would keep the work, and the work the sockets
        # Every rank adds in the order of the ranks, so that all have the same bits.
        first, *middle, last = self._parts.view(-1, self._total.numel())
        for part in middle:
            first.add_(part)
        torch.add(first, last, out=self._total)
