# SPDX-License-Identifier: Apache-2.0
"""Which version of the user's modules a process has imported.

A worker that takes the place of a lost one is a new process. If a module was edited since the run
began, the new process computes another loss than its peers, and neither shapes nor weights tell.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import zlib
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NOT_THE_PROGRAMS: Final = (
    sysconfig.get_path("stdlib") + os.sep,
    str(Path(__file__).parents[1]) + os.sep,  # lockstep's
)

_digests: Final[WeakKeyDictionary[ModuleType, int]] = WeakKeyDictionary()
"""The digest of each module's file, read when a worker of this process first asked for it: a
process that is kept for a later trainer still has what it has imported then."""


def source_digests(program: type) -> dict[str, int]:
    """The CRC-32 of the file of each module that `program` is made of, by the module's name.

    Those are the modules of the class and its bases, and whatever they have imported of the
    user's own; installed packages and the standard library do not change while a run trains.
    """
    found: dict[str, int] = {}
    pending = list(_namespaces_of(program))
    while pending:
        values = list(pending.pop().values())  # another thread may import meanwhile
        for name in {_module_name(value) for value in values} - found.keys():
            module = sys.modules.get(name)
            digest = None if module is None else _digest_of(module)
            if module is not None and digest is not None:
                found[name] = digest
                pending.append(vars(module))
    return found


def _namespaces_of(program: type) -> Iterator[Mapping[str, Any]]:
    """What the class and its methods refer to. One that came by value has no module here."""
    yield {each.__qualname__: each for each in program.__mro__}
    for each in program.__mro__:
        for member in vars(each).values():
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                yield function.__globals__


@functools.cache
def _holds_installed(root: Path) -> bool:
    """Whether packages were installed in this folder: pip leaves a note beside each."""
    return next(root.glob("*.dist-info"), None) is not None


def _module_name(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return name if isinstance(name, str) else ""


def _digest_of(module: ModuleType) -> int | None:
    """None for a module that is none of the program's own, or whose file cannot be read."""
    path = getattr(module, "__file__", None)
    if not path or module.__name__ == "__main__" or not path.endswith(".py"):
        return None
    depth = module.__name__.count(".") + (Path(path).name == "__init__.py")
    root = Path(path).parents[min(depth, len(Path(path).parents) - 1)]
    if path.startswith(_NOT_THE_PROGRAMS) or _holds_installed(root):
        return None
    if module not in _digests:
        try:
            _digests[module] = zlib.crc32(Path(path).read_bytes())
        except OSError:
            return None
    return _digests[module]
