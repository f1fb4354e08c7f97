# SPDX-License-Identifier: Apache-2.0
"""Replacing functions of torch, and putting every one back."""

from __future__ import annotations

import contextlib
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


def _forget_list() -> None:
    if _is_listed():
        _compilers_list().cache_clear()


class Patches:
    """What was replaced, so that `undo` leaves torch as it was.

    Attributes:
        is_empty: nothing is replaced.
    """

    def __init__(self) -> None:
        self.is_empty = True
        self._undo = contextlib.ExitStack()

    def wrap(self, owner: Any, name: str, watch: Callable[..., Any]) -> None:
        """Let a call of ``owner.name``, if there is such a function, be ``watch(original, ...)``.

        While torch traces, the original runs: its graph is then the same as without us.
        """
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if is_recorded():
                return original(*args, **kwargs)
            return watch(original, *args, **kwargs)

        self._replace(owner, name, stand_in)

    def _replace(self, owner: Any, name: str, stand_in: Any) -> None:
        held = vars(owner).get(name, _MISSING)

        def put_back() -> None:
            if vars(owner).get(name) is not stand_in:
                return  # what somebody replaced after us stays theirs
            if held is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, held)

        setattr(owner, name, stand_in)
        self.is_empty = False
        self.keep(put_back)

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
                self._replace(owner, name, getattr(first, name))
            elif held is not _MISSING:
                self.wrap(owner, name, watch)

    def wrap_operator(self, name: str, watch: Callable[..., Any]) -> None:
        """Replace ``torch.name``, an operator that TorchScript knows by its identity, as `wrap`."""
        if self.is_empty and not _is_listed():
            # The last to be undone: an operator of ours is not known any more when its number can
            # be another's.
            self.keep(_forget_list)
        # Asked first: torch lists its operators once, and would list ours in the place of its own.
        operator = _builtins._find_builtin(getattr(torch, name, None))
        # The same of the functions to which `torch.set_default_device` gives a device.
        _device_constructors()
        self.wrap(torch, name, watch)
        watched = getattr(torch, name)
        watched.__module__, watched.__qualname__ = "torch", name  # where a pickle looks for it
        if operator is not None:
            table = _builtins._get_builtin_table()
            table[id(watched)] = operator
            self.keep(functools.partial(table.pop, id(watched), None))

    def keep(self, undo: Callable[[], object]) -> None:
        """Something to be undone by `undo`, as a hook of torch's own."""
        self._undo.callback(undo)

    def undo(self) -> None:
        """Put everything back, last first."""
        self._undo.close()
        self.is_empty = True
