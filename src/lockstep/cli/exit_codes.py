# SPDX-License-Identifier: Apache-2.0
"""How ``lockstep train``, ``replay`` and ``bisect`` end, beside 0."""

from __future__ import annotations

from typing import Final

FAILED: Final = 1
USAGE: Final = 2
DIFFERS: Final = 65
"""As `lockstep audit` ends with findings."""
INTERRUPTED: Final = 130
"""As a shell says of a command that Ctrl-C has ended."""
