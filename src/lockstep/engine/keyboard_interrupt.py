# SPDX-License-Identifier: Apache-2.0
"""Raises a Ctrl-C that came in Ray's compiled code as KeyboardInterrupt."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def reraise_keyboard_interrupt() -> Iterator[None]:
    """Around a wait for Ray, raise Ctrl-C as KeyboardInterrupt.

    Python reports a Ctrl-C in Ray's compiled code as a SystemError, which ``except
    KeyboardInterrupt`` in lockstep or in the user's program would miss.
    """
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        raise
