# SPDX-License-Identifier: Apache-2.0
"""`LateParameters`: parameters that a program adds to a synchronised model, which stay unreduced.

Torch calls a hook for every parameter and module that is registered anywhere; a look at the model's
tree after each backward would cost more than the backward's hooks. The models are asked only after
something was registered in them.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lockstep.compiler_disable import disable_dynamo
from lockstep.sync.local_parameters import is_local

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch.utils.hooks import RemovableHandle


class LateParameters:
    """The parameters of some modules that were added after synchronisation began.

    Args:
        modules: the roots.
        known: the parameters that are synchronised.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], known: Iterable[torch.Tensor]) -> None:
        self._modules = list(modules)
        self._known = {id(param) for param in known}
        # Those that were left out on purpose (local ones) stay left out.
        self._known |= {id(param) for param in self._parameters()}
        self._members = self._ids()
        self._has_changed = False
        self._found: list[tuple[str, torch.nn.Parameter]] = []
        _listeners.add(self)

    def note_registration(self, module: torch.nn.Module) -> None:
        """Note that a parameter or module was registered in `module`."""
        if id(module) in self._members:
            self._has_changed = True

    def has_trainable(self) -> bool:
        """Whether a late parameter could get a gradient."""
        self._look()
        return any(param.requires_grad and not is_local(param) for _, param in self._found)

    def is_in_modules(self, param: torch.Tensor) -> bool:
        """Whether `param` is in the modules now; looks at every module."""
        return any(one is param for one in self._parameters())

    def names_with_gradient(self) -> list[str]:
        """The names of late parameters that have got a gradient."""
        self._look()
        return [
            name for name, param in self._found if param.grad is not None and not is_local(param)
        ]

    def _look(self) -> None:
        if self._has_changed:
            self._has_changed = False
            self._members = self._ids()
            self._found = [
                (name, param)
                for module in self._modules
                for name, param in module.named_parameters()
                if id(param) not in self._known
            ]

    def release(self) -> None:
        """Stop looking for late parameters."""
        _listeners.discard(self)

    def _parameters(self) -> list[torch.Tensor]:
        return [param for module in self._modules for param in module.parameters()]

    def _ids(self) -> set[int]:
        return {id(part) for module in self._modules for part in module.modules()}


class _Listeners:
    """All `LateParameters` of this process, for whom torch calls one hook of each kind.

    The hooks go with the last that is released; one that is only collected leaves them, because
    torch may be iterating over its hooks then. Ranks may be threads.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may free a `LateParameters` inside.
        self._lock = threading.RLock()
        self._all: weakref.WeakSet[LateParameters] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []

    def add(self, one: LateParameters) -> None:
        with self._lock:
            self._all.add(one)
            if not self._handles:
                tell = disable_dynamo(self._tell)
                self._handles = [
                    register_module_parameter_registration_hook(tell),
                    register_module_module_registration_hook(tell),
                ]

    def discard(self, one: LateParameters) -> None:
        with self._lock:
            self._all.discard(one)
            if not len(self._all):
                for handle in self._handles:
                    handle.remove()
                self._handles = []

    def _tell(self, module: torch.nn.Module, *_: Any) -> None:
        with self._lock:
            for one in list(self._all):
                one.note_registration(module)


_listeners = _Listeners()
