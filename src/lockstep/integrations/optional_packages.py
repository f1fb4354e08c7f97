# SPDX-License-Identifier: Apache-2.0
"""Imports optional packages; the error for a missing one names the command that installs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lockstep.error_texts import first_line
from lockstep.errors import NotAvailableError


def import_optional(module: str, *, extra: str, by: str) -> Any:
    """Import `module`, which the extra `extra` of lockstep installs.

    Args:
        by: the feature that needs `module`, for the message.

    Raises:
        NotAvailableError: `module`, or a package that it imports, is not installed; the message
            names the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise NotAvailableError(
            f"{by} needs {error.name or module}, which is not installed",
            # Without a name: some packages check their own dependencies, and name them in the text.
            cause=None if error.name else first_line(error),
            fix=f'pip install "lockstep-train[{extra}]"',
        ) from error
