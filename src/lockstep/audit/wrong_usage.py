# SPDX-License-Identifier: Apache-2.0
"""A command line that argparse refuses leaves a JSON file, too."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from lockstep.audit.exit_codes import USAGE
from lockstep.audit.options import DEFAULT_RANKS, IS_MODULE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def json_also_of_wrong_usage(arguments: Sequence[str]) -> Iterator[None]:
    """Around reading a command line: one that argparse refuses leaves its JSON file, too."""
    try:
        yield
    except SystemExit as leaving:
        path = _json_among(arguments)
        if leaving.code == USAGE and path is not None:
            from lockstep.audit.outcome import write_nothing_found

            with contextlib.suppress(OSError):  # it may be what was refused
                write_nothing_found(path, DEFAULT_RANKS)
        raise


def _json_among(arguments: Sequence[str]) -> str | None:
    """What ``--json`` names; what follows the script is the script's own."""
    option = ""
    for word in arguments:
        if word in IS_MODULE:
            continue
        if word.startswith("-"):
            option, _, value = word.partition("=")
            if option == "--json" and value:
                return value
            option = "" if value else option
        elif option == "--json":
            return word
        elif not option:
            return None
        else:
            option = ""
    return None
