# SPDX-License-Identifier: Apache-2.0
"""Rows of other ranks on their way from a collective to the loss that they enter.

They are known by their memory. What makes a copy of them is watched, until backward: joining,
choosing and scaling rows is what usually comes next.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

_JOINING: Final = (
    (torch, "cat"),
    (torch, "concat"),
    (torch, "stack"),
    (torch, "vstack"),
    (torch.nn.functional, "normalize"),
)
_COPYING: Final = ("__getitem__", "__mul__", "__truediv__", "clone", "contiguous", "float", "to")
"""Methods of a tensor."""

_MOST: Final = 64
"""Of them at once: what is followed is kept alive."""


def follow(probe: Probe) -> None:
    """Follow gathered rows through the operations that usually come next, until backward.

    Only then: TorchScript knows these functions by their identity.
    """
    if not probe.following.is_empty:
        return
    for owner, name in _JOINING:
        probe.following.wrap(owner, name, functools.partial(_follower, probe))
    for name in _COPYING:
        probe.following.wrap(torch.Tensor, name, functools.partial(_copier, probe))


def _follower(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            given = args[0] if args else kwargs.get("tensors", kwargs.get("input"))
            parts = given if isinstance(given, list | tuple) else [given]
            origin = _origin_of(probe, parts)
            if origin is not None:
                probe.tainted.append((result, origin))
        return result

    return watched


def _copier(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # Of what has a graph, the graph tells.
        if not isinstance(result, torch.Tensor) or result.requires_grad:
            return result
        if result.is_floating_point() and len(probe.tainted) < _MOST:
            origin = _origin_of(probe, args[:1])
            if origin is not None:
                probe.tainted.append((result, origin))
        return result

    return watched


def _origin_of(probe: Probe, parts: list[Any] | tuple[Any, ...]) -> dict[str, Any] | None:
    held = [part for part in parts if isinstance(part, torch.Tensor)]
    for part in held:
        for known, origin in probe.tainted:
            if storage_of(known) == storage_of(part):
                return origin
    own = [part for part in held if part.requires_grad]
    if len(own) != 1:
        return None
    for received, origin in probe.detached:
        # A rank's own rows, which have a gradient, take the place of what was sent of them.
        others = {storage_of(t) for t in received}
        of_all = len(held) == origin["group"] and origin["rows"] == list(own[0].shape)
        if of_all and all(part is own[0] or storage_of(part) in others for part in held):
            return origin
    return None


def storage_of(tensor: torch.Tensor) -> int | None:
    """Where its elements are; of one that waits for another, where that one's are."""
    held = getattr(tensor, "elem", tensor)
    if held.layout is not torch.strided or held.is_meta:
        return None
    try:
        return held.untyped_storage().data_ptr() or None
    except RuntimeError:  # it stands for pieces elsewhere
        return None
