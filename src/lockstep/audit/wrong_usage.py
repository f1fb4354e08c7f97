# SPDX-License-Identifier: Apache-2.0
"""A command line that argparse refuses leaves the files that it asks for, too."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from lockstep.audit.exit_codes import USAGE
from lockstep.audit.options import DEFAULT_RANKS, FILE_FORMATS, WITHOUT_VALUE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def files_also_of_wrong_usage(arguments: Sequence[str]) -> Iterator[None]:
    """Around reading a command line: one that argparse refuses leaves its files, too."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == USAGE:
            from lockstep.audit.outcome import write_nothing_found

            for name, path in _files_among(arguments).items():
                with contextlib.suppress(OSError):  # it may be what was refused
                    write_nothing_found({name: path}, DEFAULT_RANKS)
        raise


def _files_among(arguments: Sequence[str]) -> dict[str, str]:
    """The file of each format; what follows the script is the script's own."""
    words: dict[str, str] = {}
    option = ""
    for word in arguments:
        if word in WITHOUT_VALUE:
            continue
        if word.startswith("-"):
            option, _, value = word.partition("=")
            words[option] = value
            option = "" if value else option
        elif not option:
            break
        else:
            words[option] = word
            option = ""
    return {name: path for name in FILE_FORMATS if (path := words.get(f"--{name}"))}
