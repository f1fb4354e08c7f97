# SPDX-License-Identifier: Apache-2.0
"""Importing large packages without collecting garbage that is not there."""

from __future__ import annotations

import gc
import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def gc_paused() -> Iterator[None]:
    """Imports make objects by the hundred thousand, and no garbage.

    Measured: importing torch and its compiler front end (which an optimizer imports)
    takes a sixth less when the collector does not go through them again and again, and
    importing Ray after torch a third less.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_and_freeze(module: str) -> None:
    """Import what lives as long as the process, so that no later collection looks at it either."""
    with gc_paused():
        importlib.import_module(module)
        gc.freeze()
