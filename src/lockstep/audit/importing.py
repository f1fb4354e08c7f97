# SPDX-License-Identifier: Apache-2.0
"""Do something as soon as a module has been imported, and not earlier.

A script may set environment variables before it imports torch; the audit must not be first.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Loader:
    """The module's own loader, and then the callback."""

    def __init__(self, loader: Any, executed: Callable[[], None]) -> None:
        self._loader = loader
        self._executed = executed

    def __getattr__(self, name: str) -> Any:
        # Who only looks for the module may ask its loader for anything.
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module has its own loader, as without us.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._executed()


class _Finder:
    """Stands first in ``sys.meta_path`` until its module has been executed.

    Not until it was found: ``importlib.util.find_spec`` asks whether there is a torch, and imports
    nothing.
    """

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, self._executed)  # type: ignore[assignment]
                    return spec
        return None

    def _executed(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._callback()


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call `callback` when module `name` has been imported; now, if it has been."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _Finder(name, callback))
