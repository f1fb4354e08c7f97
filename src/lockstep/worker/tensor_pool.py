# SPDX-License-Identifier: Apache-2.0
"""Memory of snapshots that have been written, for the next ones.

Memory fresh from the operating system is mapped page by page as it is written to. Measured for
400 MB: a copy into it takes ten times as long as one into memory that was written to before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from lockstep.tensor_copies import is_block
from lockstep.tensor_tree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch


class TensorPool:
    """Tensors on the CPU that may be written over.

    `put_back` may be called from another thread than `copy_of`.
    """

    def __init__(self) -> None:
        self._free: defaultdict[Hashable, deque[torch.Tensor]] = defaultdict(deque)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on the CPU."""
        if not is_block(tensor):
            return tensor.to("cpu", copy=True)
        try:
            place = self._free[_kind(tensor)].popleft()
        except IndexError:
            return tensor.to("cpu", copy=True)
        return place.copy_(tensor)

    def put_back(self, state: Any) -> None:
        """Take the tensors of a state that is not needed any more."""
        # By identity: what stands in two places of a state must not become two copies' memory.
        tensors = {id(tensor): tensor for tensor in tensors_in(state)}
        for tensor in tensors.values():
            if is_block(tensor):
                self._free[_kind(tensor)].append(tensor)

    def clear(self) -> None:
        """Free the tensors that the latest snapshot did not need; the model may have changed."""
        self._free.clear()


def _kind(tensor: torch.Tensor) -> Hashable:
    return tensor.dtype, tensor.shape, tensor.stride()
