# SPDX-License-Identifier: Apache-2.0
"""How ``lockstep train``, ``replay`` and ``bisect`` end, beside 0."""

from __future__ import annotations

from typing import Final

from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.worker.call_outcome import is_of_rank

FAILED: Final = 1
USAGE: Final = 2
DIFFERS: Final = 65
"""As `lockstep audit` ends with findings."""
INTERRUPTED: Final = 130
"""As a shell says of a command that Ctrl-C has ended."""


def code_of(error: BaseException) -> int:
    """USAGE for options that cannot be right; FAILED for all else, and whatever a worker raised."""
    is_usage = isinstance(error, ConfigurationError | NotAvailableError)
    return USAGE if is_usage and not is_of_rank(error) else FAILED
