# SPDX-License-Identifier: Apache-2.0
"""Replacing functions of torch, and putting every one back."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_MISSING = object()


def is_recorded() -> bool:
    """Does torch.compile or torch.jit.trace write down what is called? Ours would be in there."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


class Patches:
    """What was replaced, so that `undo` leaves torch as it was."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._handles: list[Any] = []

    def wrap(
        self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace ``owner.name`` by ``around(original)``, if there is such a function.

        While torch traces, the original runs: its graph is then the same as without us.
        """
        held = vars(owner).get(name, _MISSING)
        original = getattr(owner, name, None)
        if original is None:
            return
        watched = around(original)

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if is_recorded():
                return original(*args, **kwargs)
            return watched(*args, **kwargs)

        setattr(owner, name, stand_in)
        self._undo.append((owner, name, held, stand_in))

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
        self._undo.clear()
        self._handles.clear()
