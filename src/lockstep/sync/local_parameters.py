# SPDX-License-Identifier: Apache-2.0
"""`local`: marks parameters, buffers and modules that differ between ranks by design.

A parameter carries its mark itself, because optimizers hold it without its module. A buffer's mark
is with its module and its name: a forward may put another tensor in the place of the marked one
(``self.h = h.detach()``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from lockstep._torch_compat import buffers_of, parameters_of
from lockstep.errors import WrongTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MARK = "_lockstep_local"

_BUFFER_NAMES = "_lockstep_local_buffers"
"""The attribute of a module with the names of those of its buffers that were marked alone."""

Owned = TypeVar("Owned", torch.Tensor, torch.nn.Module)


def local(parameter_or_module: Owned) -> Owned:
    """Leave a parameter, a buffer or a whole module to each rank: never synchronised.

    It is not compared at attach, not broadcast, its gradients are not reduced, and an
    optimizer may hold it. Mark it before a `GradientSync` is attached; a parameter that is marked
    alone, and not with its module, has to be marked again in a deep copy of the model. A buffer
    stays each rank's own when a forward puts another tensor in its place.

    Clip the gradients of shared parameters by a norm of these alone: one that counts local
    parameters is another one on each rank, and the step is refused.

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
    copy of a parameter does not. And note on its module each buffer that was marked alone, before
    a forward replaces it."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    for part in parts:
        if is_local(part):
            local(part)
    for part in parts:
        held = buffers_of(part).items()
        marked = {key for key, buffer in held if buffer is not None and is_local(buffer)}
        if marked - _noted_in(part):
            setattr(part, _BUFFER_NAMES, _noted_in(part) | marked)


def _noted_in(module: torch.nn.Module) -> frozenset[str]:
    noted: frozenset[str] = vars(module).get(_BUFFER_NAMES, frozenset())
    return noted


def is_local(parameter_or_module: torch.Tensor | torch.nn.Module) -> bool:
    """Whether the program has marked the tensor or module with `local`."""
    return getattr(parameter_or_module, _MARK, False)


def buffer_of(owner: torch.nn.Module, key: str) -> torch.Tensor | None:
    """The buffer `key` of `owner`; None without one. TorchScript's tables have no ``get``."""
    return next((buffer for name, buffer in buffers_of(owner).items() if name == key), None)


def is_local_buffer(owner: torch.nn.Module, key: str) -> bool:
    """Whether the program has marked the buffer `key` of `owner`, whichever tensor it is now.

    Also of a buffer that is None in this step, so that the ranks answer alike.
    """
    if is_local(owner) or key in _noted_in(owner):
        return True
    buffer = buffer_of(owner, key)
    return buffer is not None and is_local(buffer)


def named_local_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The local parameters and buffers in `module`; one with several names under each of them.

    Yields:
        Name and tensor; None for a buffer that no forward has filled.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for key, parameter in parameters_of(owner).items():
            if parameter is not None and is_local(parameter):
                yield prefix + key, parameter
        for key, buffer in buffers_of(owner).items():
            if is_local_buffer(owner, key):
                yield prefix + key, buffer
