# SPDX-License-Identifier: Apache-2.0
"""`LateParameters`: parameters that a program adds to a synchronised model, which stay unreduced.

Also buffers, which are not made equal to rank 0's. Torch calls a hook for every parameter, buffer
and module that is registered anywhere; a look at the model's
tree after each backward would cost more than the backward's hooks. The models are asked only after
something was registered in them.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lockstep._torch_compat import buffers_of, is_persistent
from lockstep.compiler_disable import disable_dynamo
from lockstep.sync.local_parameters import is_local, is_local_buffer
from lockstep.sync.round_contribution import Fault
from lockstep.tensor_copies import is_block

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
        self._buffers = set(self._buffer_places())
        self._late_buffers: list[tuple[torch.nn.Module, str]] = []  # not asked for yet
        self._has_changed = False
        self._found: list[tuple[str, torch.nn.Parameter]] = []
        _listeners.add(self)

    def note_registration(self, module: torch.nn.Module) -> None:
        """Note that a parameter or module was registered in `module`."""
        if id(module) in self._members:
            self._has_changed = True

    def note_buffer(self, module: torch.nn.Module, key: str) -> None:
        """Note that a buffer was registered in `module`; a known one may be at every forward."""
        if (module, key) not in self._buffers:
            self.note_registration(module)

    def take_buffers(self) -> list[torch.Tensor]:
        """The buffers that were added since the last call, unless they are no state or local."""
        self._look()
        late, self._late_buffers = self._late_buffers, []
        found = [(owner, key, buffers_of(owner).get(key)) for owner, key in late]
        return [
            buffer
            for owner, key, buffer in found
            if buffer is not None and is_block(buffer)
            if is_persistent(owner, key) and not is_local_buffer(owner, key)
        ]

    def has_trainable(self) -> bool:
        """Whether a late parameter could get a gradient."""
        self._look()
        return any(param.requires_grad and not is_local(param) for _, param in self._found)

    def is_in_modules(self, param: torch.Tensor) -> bool:
        """Whether `param` is in the modules now; looks at every module."""
        return any(one is param for one in self._parameters())

    def faults(self) -> list[Fault]:
        """The reason to refuse a round, if late parameters have got a gradient."""
        self._look()
        names = [
            name for name, param in self._found if param.grad is not None and not is_local(param)
        ]
        return [Fault.of("added_parameter", names)] if names else []

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
            late = [place for place in self._buffer_places() if place not in self._buffers]
            self._late_buffers += late
            self._buffers.update(late)

    def release(self) -> None:
        """Stop looking for late parameters."""
        _listeners.discard(self)

    def _parameters(self) -> list[torch.Tensor]:
        return [param for module in self._modules for param in module.parameters()]

    def _buffer_places(self) -> list[tuple[torch.nn.Module, str]]:
        parts = [part for module in self._modules for part in module.modules()]
        return [(part, key) for part in parts for key in buffers_of(part)]

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
                    register_module_buffer_registration_hook(disable_dynamo(self._tell_buffer)),
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

    def _tell_buffer(self, module: torch.nn.Module, key: str, _: Any) -> None:
        with self._lock:
            for one in list(self._all):
                one.note_buffer(module, key)


_listeners = _Listeners()
