# SPDX-License-Identifier: Apache-2.0
"""Memory of copies that nobody needs any more, for the next ones.

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
    """Tensors on the CPU, waiting to be written over.

    They may be put back from another thread than the one that takes them.
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
        """Take the tensors of a copy that nobody will look at again."""
        # By identity: what stands in two places of a state must not become two copies' memory.
        tensors = {id(tensor): tensor for tensor in tensors_in(state)}
        for tensor in tensors.values():
            if is_block(tensor):
                self._free[_kind(tensor)].append(tensor)

    def clear(self) -> None:
        """Let go of what was not needed; the model may have changed."""
        self._free.clear()


def _kind(tensor: torch.Tensor) -> Hashable:
    return tensor.dtype, tensor.shape, tensor.stride()
