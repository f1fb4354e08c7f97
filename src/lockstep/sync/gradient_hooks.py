# SPDX-License-Identifier: Apache-2.0
"""To be called before and after a parameter's gradient is accumulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle


def hook_gradient(
    param: torch.Tensor,
    before: Callable[[object], None] | None,
    after: Callable[[torch.Tensor], None],
) -> list[Any]:
    """Call `before` and `after` around each accumulation into ``param.grad``.

    Neither is called by ``torch.autograd.grad``, which accumulates nothing: hence the node's
    pre-hook and not the tensor's. The node dies with its last user, so a handle keeps it.

    Returns:
        Handles to `remove`.
    """
    # A frozen parameter cannot take a hook, but keeps one: it may be unfrozen later.
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    handles: list[Any] = [param.register_post_accumulate_grad_hook(after)]
    if before is not None:
        handles.append(_BeforeAccumulation(param, before))
    if frozen:
        param.requires_grad_(False)
    return handles


class _BeforeAccumulation:
    def __init__(self, param: torch.Tensor, function: Callable[[object], None]) -> None:
        with torch.enable_grad():
            view = param.view_as(param).grad_fn
        assert view is not None
        self._node: torch.autograd.graph.Node | None = view.next_functions[0][0]
        assert self._node is not None
        self._handle: RemovableHandle = self._node.register_prehook(function)

    def remove(self) -> None:
        self._handle.remove()
        self._node = None
