# SPDX-License-Identifier: Apache-2.0
"""Torch's functional collectives, whose backward communicates in C++ and calls nothing of Python's.

Only what has a gradient is looked at: sharded tensors communicate through them as well, below
autograd. None of them is counted among a rank's calls.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed._functional_collectives as functional

from lockstep.audit.facts import Collective, Gathered
from lockstep.audit.probe.collectives import ranks_of
from lockstep.audit.probe.frames import lines_through_a_library
from lockstep.audit.probe.gathers import keep_reduced, taint

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

_GATHERS: Final = "all_gather_single"
"""Its older names call it, and warn of the line that called them, which is to be the program's."""

_REDUCES: Final = "all_reduce"


def install(probe: Probe) -> None:
    """Watch those that gather or add up what has a gradient."""
    for name in (_GATHERS, _REDUCES):
        probe.patches.wrap(functional, name, functools.partial(_watcher, probe, name))


def _watcher(probe: Probe, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("self")
        looks = probe.is_on and probe.detailed and not probe.in_backward
        has_gradient = isinstance(tensor, torch.Tensor) and tensor.requires_grad
        if not looks or not has_gradient or probe.inside("collective") or probe.is_elsewhere():
            return original(*args, **kwargs)
        probe.enter("collective")
        try:
            result = original(*args, **kwargs)
        finally:
            probe.enter("collective", -1)
        probe.harmlessly(_note, probe, name, tensor, result, args, kwargs)
        return result

    return watched


def _note(
    probe: Probe, name: str, tensor: torch.Tensor, result: torch.Tensor, args: Any, kwargs: Any
) -> None:
    group = args[2] if len(args) > 2 else kwargs.get("group")
    if hasattr(group, "get_group"):
        group = group.get_group()  # a mesh of one dimension
    call = Collective(
        name, lines_through_a_library(), group if isinstance(group, list) else ranks_of(group)
    )
    if len(call.group) < 2:
        return
    call.shape = list(tensor.shape)
    node = result.grad_fn
    if name == _GATHERS:
        probe.remember("collectives", call)
        taint(probe, call, tensor, [result], node, adjoint=node is not None, is_there=False)
    elif node is not None:
        reduction = args[1] if len(args) > 1 else kwargs.get("reduceOp", "")
        call.reduction = str(reduction).upper()
        probe.remember("collectives", call)
        origin = Gathered(
            name, call.where, len(call.group), call.shape, True, call.reduction, adjoint=True
        )
        keep_reduced(probe, result, node, origin)
