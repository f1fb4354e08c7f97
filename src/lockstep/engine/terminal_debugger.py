# SPDX-License-Identifier: Apache-2.0
"""`breakpoint()` in a worker of this process opens the debugger of this terminal."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLE: Final = "PYTHONBREAKPOINT"

# Ray 2.60 sets this hook in drivers: it waits for an editor to attach; without debugpy it does
# nothing.
_RAYS_HOOK: Final = "ray.util.rpdb._driver_set_trace"


@contextmanager
def terminal_debugger() -> Iterator[None]:
    """Inside, `breakpoint()` opens Python's debugger, not Ray's; keeps a hook of the user's."""
    if os.environ.get(_VARIABLE) != _RAYS_HOOK:
        yield
        return
    del os.environ[_VARIABLE]
    try:
        yield
    finally:
        os.environ.setdefault(_VARIABLE, _RAYS_HOOK)
