# SPDX-License-Identifier: Apache-2.0
"""A small all-reduce over few ranks as an all-gather, after which each rank adds up the parts.

Over sockets the number of messages that follow one another takes the time of a small sum, and not
their bytes: a ring all-reduce of N ranks takes 2 (N - 1) messages, an all-gather N - 1.

Rejected: a message to and from each rank (``send`` and ``recv``). That is faster still, by 0.1 ms,
but in one of a hundred failures a rank did not hear that its peer had closed the connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from datetime import timedelta

_MOST_BYTES: Final = 1 << 19
"""The size of all parts together above which the smaller pieces of an all-reduce win."""
_MOST_RANKS: Final = 4


def is_faster_by_all_gather(tensor: torch.Tensor, size: int) -> bool:
    """Whether an all-gather and a sum on each of `size` ranks beat an all-reduce of `tensor`."""
    return (
        1 < size <= _MOST_RANKS
        and tensor.numel() > 1
        and tensor.numel() * tensor.element_size() * size <= _MOST_BYTES
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and tensor.dim() == 1
    )


class AllGatherSum:
    """A sum whose all-gather is in flight; has the ``wait`` of torch's ``Work``.

    Args:
        work: of the all-gather.
        parts: the tensors of all ranks, by rank; filled when `work` is done.
        total: receives the sum.
    """

    def __init__(self, work: Any, parts: torch.Tensor, total: torch.Tensor) -> None:
        self._work = work
        self._parts = parts
        self._total = total

    def is_completed(self) -> bool:
        """Whether the all-gather is done, or has failed."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, timeout: timedelta) -> None:
        """Wait for the all-gather, and add.

        Raises:
            RuntimeError: a peer went away, or did not come within the group's timeout; or `timeout`
                has passed, and `is_completed` is still False.
        """
        is_last = self.is_completed()
        try:
            self._work.wait(timeout)
        except RuntimeError:
            if is_last:  # a traceback would keep the work alive, and the work the sockets
                self._work = None
            raise
        self._work = None
        # Every rank adds in the order of the ranks, so that all have the same bits.
        first, *middle, last = self._parts.view(-1, self._total.numel())
        for part in middle:
            first.add_(part)
        torch.add(first, last, out=self._total)
