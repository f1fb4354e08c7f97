# SPDX-License-Identifier: Apache-2.0
"""`local`: marks parameters, buffers and modules that differ between ranks by design."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from lockstep.errors import WrongTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable

_MARK = "_lockstep_local"

Owned = TypeVar("Owned", torch.Tensor, torch.nn.Module)


def local(parameter_or_module: Owned) -> Owned:
    """Leave a parameter, a buffer or a whole module to each rank: never synchronised.

    It is not compared at attach, not broadcast, its gradients are not reduced, and an
    optimizer may hold it. Mark it before a `GradientSync` is attached; a parameter that is marked
    alone, and not with its module, has to be marked again in a deep copy of the model.

    A checkpoint of `TorchTrainer` holds those of every rank. Where another number of workers goes
    on from it, all begin with rank 0's; and a worker that replaces a lost one begins with those of
    the worker that sends it the state.

    Args:
        parameter_or_module: a tensor, or a module with everything in it.

    Returns:
        Its argument.

    Gradient:
        Each rank's own; of weighted backwards that of the mean over the rank's own samples.

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


def mark_copies(modules: Iterable[torch.nn.Module]) -> None:
    """Mark the tensors of local modules again: a deep copy of a module keeps its mark, and a deep
    copy of a parameter does not."""
    for module in modules:
        for part in module.modules():
            if is_local(part):
                local(part)


def is_local(parameter_or_module: torch.Tensor | torch.nn.Module) -> bool:
    """Whether the program has marked the tensor or module with `local`."""
    return getattr(parameter_or_module, _MARK, False)
