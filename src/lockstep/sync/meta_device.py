# SPDX-License-Identifier: Apache-2.0
"""Gives models that were built on torch's ``meta`` device memory and initial values.

A model that does not fit on one device is built without memory (``with torch.device("meta")``), and
gets its weights unit by unit, each of which is cut into shards before the next one.
``reset_parameters()`` of each module that holds parameters or buffers gives them their values, that
of a module's children before its own, as in constructors. What else a constructor does to values
(``self.apply(init)``, a buffer that it computes) did not happen on ``meta``: memory that nobody has
written to is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from lockstep._torch_compat import buffers_of, parameters_of
from lockstep.errors import ConfigurationError
from lockstep.sync.local_parameters import is_local

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_NAMES: Final = ("reset_parameters", "_reset_parameters")  # the latter in torch's transformers

_ALIGNMENT: Final = 64
"""Bytes at a multiple of which each parameter begins."""

_UNWRITTEN: Final = 0xA5
"""The byte in memory that nobody has written to."""


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
    reset_buffers(prepare(module, device))
    for each in (*units, module):
        initialise_parameters(each, device)


def prepare(module: nn.Module, device: torch.device) -> list[nn.Module]:
    """Move what has memory to `device`, and give buffers memory there. Draws no random number.

    Returns:
        The modules whose buffers, and no parameters, had no memory; see `reset_buffers`.

    Raises:
        ConfigurationError: a module does not say how its parameters begin.
    """
    for name, part in module.named_modules():
        if _has_meta(part):
            _require_reset(name, part)
    waiting: list[nn.Module] = []
    for part in _children_first(module):
        for param in parameters_of(part).values():
            if param is not None and not param.is_meta:
                param.data = param.data.to(device)
        held: dict[str, Any] = buffers_of(part)
        was_on_meta = _has_meta(part)
        for key, buffer in held.items():
            if buffer is not None:
                held[key] = _unwritten(buffer, device) if buffer.is_meta else buffer.to(device)
        if was_on_meta and not _has_meta(part):  # it has buffers alone
            waiting.append(part)
    return waiting


def reset_buffers(parts: Iterable[nn.Module]) -> None:
    """Give the buffers of `parts` their values, when it is their model's turn to be initialised.

    Raises:
        ConfigurationError: `reset_parameters` left a value out.
    """
    for part in parts:
        _reset(part, kept=[each for each in parameters_of(part).values() if each is not None])


class ReusedMemory:
    """One block in which the parameters of one unit lie until they are cut up, then the next one's.

    Fresh memory for each would leave the heap full of gaps between the shards, as large as the
    whole model (measured with glibc).

    Args:
        units: in their order; a root after those that it holds, which are cut up by then.
        device: of the block.
    """

    def __init__(self, units: Iterable[nn.Module], device: torch.device) -> None:
        seen: set[nn.Parameter] = set()
        sizes: list[int] = []
        for unit in units:
            own = {param for param in unit.parameters() if param.is_meta} - seen
            sizes.append(sum(map(_aligned, own)))
            seen |= own
        self._block = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)
        self._taken = 0

    def free(self) -> None:
        """Let the next parameters lie where the last ones did."""
        self._taken = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor like `like`, which shows whether somebody has written to it."""
        num_bytes = like.numel() * like.element_size()
        part = self._block[self._taken : self._taken + num_bytes].fill_(_UNWRITTEN)
        self._taken += _aligned(like)
        return part.view(like.dtype).view(like.shape)


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def initialise_parameters(
    module: nn.Module, device: torch.device, memory: ReusedMemory | None = None
) -> list[nn.Parameter]:
    """Give the parameters of `module` that are on ``meta`` memory on `device`, and initial values.

    They stay the same objects, which optimizers hold. A parameter that several modules share begins
    as the first of them says.

    Args:
        memory: where they lie, but for those of `lockstep.local`; None for memory of their own.

    Returns:
        The parameters that have memory now.

    Raises:
        ConfigurationError: `reset_parameters` left a value out.
    """
    owners = [part for part in _children_first(module) if _has_meta(part)]
    filled: list[nn.Parameter] = []
    done: set[int] = set()
    for part in owners:
        for param in parameters_of(part).values():
            if param is not None and param.is_meta:
                values = (
                    _unwritten(param, device)
                    if memory is None or is_local(param)
                    else memory.take(param)
                )
                new = nn.Parameter(values, requires_grad=param.requires_grad)
                vars(new).update(vars(param))
                torch.utils.swap_tensors(param, new)
                filled.append(param)
            elif param is not None and all(param is not each for each in filled):
                done.add(id(param))
    for part in owners:
        own = [param for param in parameters_of(part).values() if param is not None]
        _reset(part, kept=[param for param in own if id(param) in done])
        done.update(map(id, own))
    return filled


def _unwritten(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory that shows whether somebody has written to it."""
    memory = torch.empty_like(like, device=device)
    _bytes_of(memory).fill_(_UNWRITTEN)
    return memory


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, as rows."""
    return tensor.detach().reshape(-1).view(torch.uint8).view(-1, tensor.element_size())


def _reset(part: nn.Module, kept: Sequence[torch.Tensor]) -> None:
    """Let a module give its tensors their values, but for `kept`, which have theirs.

    Raises:
        ConfigurationError: it left a value out.
    """
    before = [(tensor, tensor.detach().clone()) for tensor in kept]
    buffers: dict[str, torch.Tensor | None] = dict(buffers_of(part))
    name = next(each for each in _NAMES if callable(getattr(part, each, None)))
    with torch.no_grad():
        getattr(part, name)()
        for target, value in before:
            target.copy_(value)
        _keep_objects(part, buffers)
    held: dict[str, torch.Tensor | None] = {**parameters_of(part), **buffers_of(part)}
    for key, tensor in held.items():
        if tensor is None or not tensor.numel():
            continue
        is_unwritten = (_bytes_of(tensor) == _UNWRITTEN).all(dim=1)
        # Of one byte's values each may be meant.
        if is_unwritten.all() if tensor.element_size() == 1 else is_unwritten.any():
            raise ConfigurationError(
                "a tensor of a module on the meta device has no value",
                where=f"`{key}` of {type(part).__name__}",
                expected=f"values that {name}() writes",
                cause="the constructor makes it, which did not happen on the meta device",
                fix=f"write all of `{key}` in {name}(), and call that in __init__",
            )


def _keep_objects(part: nn.Module, before: dict[str, torch.Tensor | None]) -> None:
    """Write what `reset_parameters` has put in the place of buffers into the buffers themselves.

    Others hold them already: the ranks agree on tensors before the values are there.
    """
    held: dict[str, Any] = buffers_of(part)
    for key, old in before.items():
        new = held.get(key)
        if old is None or new is None or new is old or _kind(old) != _kind(new):
            continue
        held[key] = old.copy_(new)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.layout


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
