# SPDX-License-Identifier: Apache-2.0
"""`TensorStash`: keeps a collective's tensors alive until the backend's thread has released them.

gloo reports a collective as done a moment before its thread drops its references to the tensors.
If the only other reference is the Python object, gloo's thread must take the GIL to drop its own.
In a process that is ending the thread does not get the GIL, and the process aborts, once in a dozen
runs, after all its work was done (https://github.com/pytorch/pytorch/issues/190489). If the group's
destructor waits for that thread, both wait for ever. So a view keeps each such tensor alive until
the thread has dropped its reference, and a wait for a collective waits for that as well.

`torch.distributed.ProcessGroupNCCL` has a stash of the same kind, for the same tensors.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import use_count

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATIENCE_S: Final = 0.1
"""The thread drops its references within microseconds, unless the backend keeps the tensors."""


class TensorStash:
    """The tensors among a collective's arguments whose only owner is their Python object.

    Tensors with another owner are safe: a bucket, of which gradients are views.

    Args:
        arguments: of the call to the backend; lists may be nested.
    """

    __slots__ = ("_stashed",)

    def __init__(self, arguments: Any) -> None:
        self._stashed = [
            # Create the view before reading use_count: outside inference mode the view adds a
            # reference, which the baseline must include.
            (tensor, tensor.view(tensor.shape), use_count(tensor))
            for tensor in _tensors(arguments)
            if tensor.device.type == "cpu" and use_count(tensor) == 1
        ]

    def wait_released(self) -> None:
        """Wait until the backend has dropped its references, at most `_PATIENCE_S`."""
        stashed, self._stashed = self._stashed, []
        deadline = None
        for tensor, _view, owners in stashed:
            while use_count(tensor) > owners:
                now = time.monotonic()
                deadline = deadline or now + _PATIENCE_S
                if now > deadline:
                    return
                time.sleep(0)  # lets a thread that waits for the GIL have it


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
