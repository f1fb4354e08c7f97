# SPDX-License-Identifier: Apache-2.0
"""Tensors that a backend's thread holds while a collective is under way.

gloo says that a collective is done a moment before its thread lets go of the tensors. Where Python
alone holds a tensor besides, that thread needs the interpreter to let go of it. In a process that
is ending the thread does not get the interpreter, and the process aborts, once in a dozen runs,
after all its work was done (https://github.com/pytorch/pytorch/issues/190489). Where the group's
destructor waits for that thread, both wait for ever. So a view keeps each such tensor alive until
the thread has let go, and a wait for a collective waits for that as well.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import use_count

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATIENCE_S: Final = 0.1
"""The thread lets go within microseconds, unless a backend keeps tensors for its own reasons."""


class CollectiveKeepalive:
    """The tensors among a collective's arguments that have no owner but Python.

    Other tensors (a bucket, say, which gradients hold as views of it) are safe.

    Args:
        arguments: as they are passed to the backend; lists may be nested.
    """

    __slots__ = ("_lent",)

    def __init__(self, arguments: Any) -> None:
        self._lent = [
            # In this order. In inference mode a view owns nothing.
            (tensor, tensor.view(tensor.shape), use_count(tensor))
            for tensor in _tensors(arguments)
            if tensor.device.type == "cpu" and use_count(tensor) == 1
        ]

    def settle(self) -> None:
        """Wait until the backend has let go."""
        lent, self._lent = self._lent, []
        deadline = None
        for tensor, _view, owners in lent:
            while use_count(tensor) > owners:
                now = time.monotonic()
                deadline = deadline or now + _PATIENCE_S
                if now > deadline:
                    return
                time.sleep(0)  # lets a thread that waits for the interpreter have it


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
