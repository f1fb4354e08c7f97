# SPDX-License-Identifier: Apache-2.0
"""Rows that travel by other functions than those of ``torch.distributed``'s collectives.

From rank to rank by ``batch_isend_irecv``, as in a ring: ``isend`` and ``irecv`` themselves are
left alone, which torch compares by identity. And by torch's functional collectives, whose backward
communicates in C++ and calls nothing of Python's: of them only what has a gradient is looked at,
since sharded tensors communicate through them as well, below autograd. None of either is counted
among a rank's calls: two ranks exchange, and others do not.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from lockstep.audit.facts import Collective, Gathered
from lockstep.audit.probe import gathers
from lockstep.audit.probe.collectives import ranks_of
from lockstep.audit.probe.frames import lines_through_a_library, users_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

_BETWEEN_TWO: Final = "batch_isend_irecv"
_GATHERS: Final = "all_gather_single"
"""Its older names call it, and warn of the line that called them, which is to be the program's."""

_REDUCES: Final = "all_reduce"


def install(probe: Probe) -> None:
    """Watch exchanges between two ranks, and what gathers or adds up what has a gradient."""
    modules = (dist.distributed_c10d, dist)
    probe.patches.wrap_in_each(modules, _BETWEEN_TWO, probe.afterwards(_note))
    for name in (_GATHERS, _REDUCES):
        probe.patches.wrap(functional, name, functools.partial(_watch, probe, name))


def _note(probe: Probe, _: Any, args: Any, kwargs: Any) -> None:
    if not probe.is_on or not probe.detailed or probe.is_elsewhere():
        return
    operations: list[Any] = args[0] if args else kwargs.get("p2p_op_list", [])
    sent = [o.tensor for o in operations if o.op.__name__ == "isend"]
    received = [o.tensor for o in operations if o.op.__name__ == "irecv"]
    call = Collective(
        _BETWEEN_TWO, users_lines(), ranks_of(operations[0].group if operations else None)
    )
    call.in_backward = probe.in_backward
    probe.remember("collectives", call)
    gathers.note_exchange(probe, call, sent, received, is_there=False)


def _watch(
    probe: Probe, name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    tensor = args[0] if args else kwargs.get("self")
    looks = probe.is_on and probe.detailed and not probe.in_backward
    has_gradient = isinstance(tensor, torch.Tensor) and tensor.requires_grad
    if not looks or not has_gradient or probe.inside("collective") or probe.is_elsewhere():
        return original(*args, **kwargs)
    with probe.counted("collective"):
        result = original(*args, **kwargs)
    probe.harmlessly(_note_functional, probe, name, tensor, result, args, kwargs)
    return result


def _note_functional(
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
        gathers.taint(probe, call, tensor, [result], node, adjoint=node is not None, is_there=False)
    elif node is not None:
        reduction = args[1] if len(args) > 1 else kwargs.get("reduceOp", "")
        call.reduction = str(reduction).upper()
        probe.remember("collectives", call)
        origin = Gathered(
            name, call.where, len(call.group), call.shape, True, call.reduction, adjoint=True
        )
        gathers.keep_reduced(probe, result, node, origin)
