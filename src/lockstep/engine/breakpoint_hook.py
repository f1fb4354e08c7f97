# SPDX-License-Identifier: Apache-2.0
"""Lets `breakpoint()` open pdb in this terminal where a worker runs in the driver's process."""

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
def without_ray_breakpoint_hook() -> Iterator[None]:
    """Inside, `breakpoint()` opens Python's debugger, not Ray's; keeps a hook of the user's."""
    if os.environ.get(_VARIABLE) != _RAYS_HOOK:
        yield
        return
    del os.environ[_VARIABLE]
    try:
        yield
    finally:
        os.environ.setdefault(_VARIABLE, _RAYS_HOOK)
