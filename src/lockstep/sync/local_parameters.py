# SPDX-License-Identifier: Apache-2.0
"""`local`: marks parameters, buffers and modules that differ between ranks by design."""

from __future__ import annotations

from typing import TypeVar

import torch

from lockstep.errors import WrongTypeError

_MARK = "_lockstep_local"

Owned = TypeVar("Owned", torch.Tensor, torch.nn.Module)


def local(parameter_or_module: Owned) -> Owned:
    """Leave a parameter, a buffer or a whole module to each rank: never synchronised.

    It is not compared at attach, not broadcast, its gradients are not reduced, and an
    optimizer may hold it. Mark it before a `GradientSync` is attached.

    Args:
        parameter_or_module: a tensor, or a module with everything in it.

    Returns:
        Its argument.

    Gradient:
        Each rank's own.

    Collective:
        None.

    Raises:
        WrongTypeError: neither a tensor nor a module.
    """
    if isinstance(parameter_or_module, torch.nn.Module):
        # The tensors carry the mark as well: one that is shared with a module outside, or held
        # by an optimizer, has to be recognised without knowing its module. The modules carry
        # it because a deep copy of a parameter loses its attributes and a module's does not.
        for module in parameter_or_module.modules():
            setattr(module, _MARK, True)
        for tensor in (*parameter_or_module.parameters(), *parameter_or_module.buffers()):
            setattr(tensor, _MARK, True)
    elif isinstance(parameter_or_module, torch.Tensor):
        setattr(parameter_or_module, _MARK, True)
    else:
        raise WrongTypeError(
            "local() takes a parameter or a module",
            got=type(parameter_or_module).__name__,
            fix="lockstep.local(model.router), or lockstep.local(model.router.weight)",
        )
    return parameter_or_module


def is_local(parameter_or_module: torch.Tensor | torch.nn.Module) -> bool:
    """Whether the program has marked the tensor or module with `local`."""
    return getattr(parameter_or_module, _MARK, False)
