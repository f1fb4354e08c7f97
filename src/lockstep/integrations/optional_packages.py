# SPDX-License-Identifier: Apache-2.0
"""Imports packages that need not be installed, and says what to type where one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lockstep.errors import NotAvailableError


def import_optional(module: str, *, extra: str, by: str) -> Any:
    """Import `module`, which the extra `extra` of lockstep installs.

    Args:
        by: what needs it, for the message.

    Raises:
        NotAvailableError: it, or what it needs itself, is not installed; says what to type.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise NotAvailableError(
            f"{by} needs {error.name or module}, which is not installed",
            # Some packages look for theirs themselves, and say what they miss in words.
            cause=None if error.name else str(error).splitlines()[0],
            fix=f'pip install "lockstep-train[{extra}]"',
        ) from error
