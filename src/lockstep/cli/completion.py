# SPDX-License-Identifier: Apache-2.0
"""Makes completion scripts for shells from the parser."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from lockstep.errors import NotAvailableError

if TYPE_CHECKING:
    import argparse

SHELLS: Final = ("bash", "zsh", "tcsh")


def print_script(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print a script for ``eval "$(lockstep completion bash)"``. Returns the exit code."""
    from lockstep.integrations.optional_packages import import_optional

    try:
        shtab = import_optional("shtab", extra="cli", by="lockstep completion")
    except NotAvailableError as error:
        print(error, file=sys.stderr)
        return 1
    print(shtab.complete(parser, shell))
    return 0
