# SPDX-License-Identifier: Apache-2.0
"""Gives models that were built on torch's ``meta`` device memory and initial values.

A model that does not fit on one device is built without memory (``with torch.device("meta")``), and
gets its weights unit by unit, each of which is cut into shards before the next one. As in the
constructors of modules, ``reset_parameters()`` of a module's children comes before its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep._torch_compat import buffers_of, parameters_of
from lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NAMES = ("reset_parameters", "_reset_parameters")  # the latter in torch's transformers


def is_on_meta(module: nn.Module) -> bool:
    """Whether a parameter or a buffer of `module` has no memory."""
    return any(_has_meta(part) for part in module.modules())


def initialise(module: nn.Module, units: Iterable[nn.Module], device: torch.device) -> None:
    """Give all of `module` memory on `device` and initial values.

    Args:
        units: parts that come first, in this order, as in a model in shards: so that the random
            numbers are the same.

    Raises:
        ConfigurationError: a module does not say how its parameters begin.
    """
    prepare(module, device)
    for each in (*units, module):
        initialise_parameters(each, device)


def prepare(module: nn.Module, device: torch.device) -> None:
    """Move what has memory to `device`, and give buffers memory there.

    Raises:
        ConfigurationError: a module does not say how its parameters begin.
    """
    for name, part in module.named_modules():
        if _has_meta(part):
            _require_reset(name, part)
    for part in _children_first(module):
        for param in parameters_of(part).values():
            if param is not None and not param.is_meta:
                param.data = param.data.to(device)
        held: dict[str, Any] = buffers_of(part)
        was_on_meta = _has_meta(part)
        for key, buffer in held.items():
            if buffer is not None and buffer.is_meta:
                held[key] = torch.empty_like(buffer, device=device)
            elif buffer is not None:
                held[key] = buffer.to(device)
        if was_on_meta and not _has_meta(part):
            _reset(part)  # it has buffers alone


def initialise_parameters(module: nn.Module, device: torch.device) -> None:
    """Give the parameters of `module` that are on ``meta`` memory on `device`, and initial values.

    They stay the same objects, which optimizers hold. A parameter that several modules share begins
    as the first of them says.
    """
    owners = [part for part in _children_first(module) if _has_meta(part)]
    for part in owners:
        for param in parameters_of(part).values():
            if param is not None and param.is_meta:
                filled = torch.empty_like(param, device=device)
                new = nn.Parameter(filled, requires_grad=param.requires_grad)
                vars(new).update(vars(param))
                torch.utils.swap_tensors(param, new)
    done: set[int] = set()
    for part in owners:
        own = [param for param in parameters_of(part).values() if param is not None]
        shared = [(param, param.detach().clone()) for param in own if id(param) in done]
        _reset(part)
        for param, value in shared:
            param.data.copy_(value)
        done.update(map(id, own))


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Each module once, after those that it holds."""
    seen: set[int] = set()

    def walk(part: nn.Module) -> Iterator[nn.Module]:
        if id(part) in seen:
            return
        seen.add(id(part))
        for child in part.children():
            yield from walk(child)
        yield part

    return walk(module)


def _has_meta(part: nn.Module) -> bool:
    own = (*parameters_of(part).values(), *buffers_of(part).values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _require_reset(name: str, part: nn.Module) -> None:
    if not any(callable(getattr(part, each, None)) for each in _NAMES):
        raise ConfigurationError(
            "a module on the meta device does not say how its parameters begin",
            where=f"`{name}` ({type(part).__name__})" if name else type(part).__name__,
            expected="a method reset_parameters(), as torch's layers have it",
            got="parameters or buffers of its own, and no such method",
            fix="write reset_parameters(self), and call it in __init__; or build the model"
            ' without torch.device("meta")',
        )


def _reset(part: nn.Module) -> None:
    name = next(each for each in _NAMES if callable(getattr(part, each, None)))
    with torch.no_grad():
        getattr(part, name)()
