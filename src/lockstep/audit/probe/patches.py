# SPDX-License-Identifier: Apache-2.0
"""Replacing functions of torch, and putting every one back."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.jit import _builtins
from torch.utils._device import _device_constructors

if TYPE_CHECKING:
    from collections.abc import Callable

_MISSING = object()


def is_recorded() -> bool:
    """Is what is called written down, by a compiler, a tracer or a CUDA graph? Ours would be, too.

    To read a number would end a capture of a CUDA graph. A torch for CUDA on a machine without a
    driver raises where it is asked for one.
    """
    recorded = torch.compiler.is_compiling() or torch._C._is_tracing()
    return recorded or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _compilers_list() -> Any:
    """What lists all functions of torch when the compiler first asks for one; None before."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return getattr(rules, "get_torch_obj_rule_map", None)


def _is_listed() -> bool:
    cached = _compilers_list()
    return cached is not None and cached.cache_info().currsize > 0


class Patches:
    """What was replaced, so that `undo` leaves torch as it was."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._handles: list[Any] = []
        self._scripted: list[int] = []
        self._was_listed = False

    def wrap(self, owner: Any, name: str, watch: Callable[..., Any]) -> None:
        """Let a call of ``owner.name``, if there is such a function, be ``watch(original, ...)``.

        While torch traces, the original runs: its graph is then the same as without us.
        """
        held = vars(owner).get(name, _MISSING)
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if is_recorded():
                return original(*args, **kwargs)
            return watch(original, *args, **kwargs)

        setattr(owner, name, stand_in)
        self._undo.append((owner, name, held, stand_in))

    def wrap_in_each(self, owners: tuple[Any, ...], name: str, watch: Callable[..., Any]) -> None:
        """As `wrap`, of what several modules hold: they go on holding one and the same.

        The first is the one that defines it; there a pickle looks for it.
        """
        first, *others = owners
        original = getattr(first, name, None)
        self.wrap(first, name, watch)
        for owner in others:
            held = vars(owner).get(name, _MISSING)
            if held is original and original is not None:
                stand_in = getattr(first, name)
                setattr(owner, name, stand_in)
                self._undo.append((owner, name, held, stand_in))
            elif held is not _MISSING:
                self.wrap(owner, name, watch)

    def wrap_operator(self, name: str, watch: Callable[..., Any]) -> None:
        """Replace ``torch.name``, an operator that TorchScript knows by its identity, as `wrap`."""
        if self.is_empty:
            self._was_listed = _is_listed()
        # Asked first: torch lists its operators once, and would list ours in the place of its own.
        operator = _builtins._find_builtin(getattr(torch, name, None))
        # The same of the functions to which `torch.set_default_device` gives a device.
        _device_constructors()
        self.wrap(torch, name, watch)
        watched = getattr(torch, name)
        watched.__module__, watched.__qualname__ = "torch", name  # where a pickle looks for it
        if operator is not None:
            stand_in = id(getattr(torch, name))
            _builtins._get_builtin_table()[stand_in] = operator
            self._scripted.append(stand_in)

    @property
    def is_empty(self) -> bool:
        """Is nothing replaced?"""
        return not self._undo

    def keep(self, handle: Any) -> None:
        """A handle of torch's own hooks, to be removed by `undo`."""
        self._handles.append(handle)

    def undo(self) -> None:
        """Put everything back, last first; what somebody replaced after us stays theirs."""
        for owner, name, held, stand_in in reversed(self._undo):
            if vars(owner).get(name) is not stand_in:
                continue
            if held is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, held)
        for handle in self._handles:
            handle.remove()
        for stand_in in self._scripted:
            _builtins._get_builtin_table().pop(stand_in, None)
        # Last: an operator of ours is not known any more when its number can be another's.
        if self._scripted and not self._was_listed and _is_listed():
            _compilers_list().cache_clear()
        self._undo.clear()
        self._handles.clear()
        self._scripted.clear()
