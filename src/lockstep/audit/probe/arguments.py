# SPDX-License-Identifier: Apache-2.0
"""What a model was given, tensor by tensor, and what its loss compares with: may it be drawn?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.audit.fingerprint import take
from lockstep.audit.probe.loaders import tensors_in
from lockstep.audit.probe.saved import saved

if TYPE_CHECKING:
    from lockstep.audit.probe.probe import Probe

_STEPS: Final = 16
_TENSORS: Final = 4
_LEAST: Final = 8
_ELEMENTS: Final = 4096
"""Of a tensor, at most, when it is told whether it may be drawn."""
_NODES: Final = 32
_WITH_TARGET: Final = {
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "L1LossBackward0",
}


def arguments_of(probe: Probe, args: Any) -> list[dict[str, Any]]:
    """Of the first tensors, their ``hash``, ``rows`` and ``size``, and ``scattered``: may it be
    random? Nothing after the first steps."""
    tensors = tensors_in(args, _TENSORS) if probe.steps_done < _STEPS else []
    if not tensors:
        return []
    hashes = take(tensors, [0] * len(tensors), norms=False).hashes
    return [
        {
            "hash": int(held),
            "rows": len(tensor) if tensor.ndim else 0,
            "size": tensor.numel(),
            "scattered": _is_scattered(tensor.detach()),
        }
        for held, tensor in zip(hashes, tensors, strict=True)
    ]


def targets_of(probe: Probe, loss: torch.Tensor) -> list[dict[str, Any]]:
    """The same of what the loss compares with, where its last operations show it."""
    waiting = [loss.grad_fn] if probe.steps_done < _STEPS else []
    for _ in range(_NODES):
        if not waiting:
            break
        node: Any = waiting.pop(0)
        if node is not None and node.name() in _WITH_TARGET:
            target = saved(node, "target")
            return arguments_of(probe, [] if target is None else [target])
        waiting += [fn for fn, _ in node.next_functions] if node is not None else []
    return []


def _is_scattered(tensor: torch.Tensor) -> bool:
    """Neither constant nor a mask, in no order, and not the same in each row: no positions."""
    plain = tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_meta
    if not plain or hasattr(tensor, "to_local") or tensor.dtype is torch.bool:
        return False
    if tensor.ndim == 0 or len(tensor) < 2 or tensor.numel() < _LEAST:
        return False
    flat = tensor.reshape(-1)
    few = flat[:: max(1, len(flat) // _ELEMENTS)].double()
    rises = few.diff()
    if bool((rises >= 0).all()) or bool((rises <= 0).all()) or len(few.unique()) <= 2:
        return False
    return not bool((tensor == tensor[:1]).all())
