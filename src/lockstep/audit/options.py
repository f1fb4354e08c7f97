# SPDX-License-Identifier: Apache-2.0
"""The command line of ``lockstep audit`` and of ``python -m lockstep.audit``. Imports no torch."""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lockstep.audit.exit_codes import FOUND, HUNG, NOT_WATCHED
from lockstep.installed_versions import PrintVersions

DEFAULT_RANKS = 2
FILE_FORMATS = ("json", "sarif", "junit")
_FILES = {
    "json": "write the findings there",
    "html": "write a page there",
    "sarif": "write the findings there as SARIF 2.1.0, for code hosts and editors",
    "junit": "write a test for each rule there, as JUnit's XML; --fail-on says which fail",
}
"""What each writes, by its option."""

FailOn = Literal["error", "warning", "never"]

IS_MODULE = ("-m", "--module")
WITHOUT_VALUE = (*IS_MODULE, "--github")
"""The options that no word of their own follows."""
_LATIN = re.compile(r"LS\d{0,3}")


@dataclass(frozen=True)
class Options:
    """What was asked for. `nproc` is None where the user did not say.

    With `is_module` the script is the name of a module, as after ``python -m``.
    """

    script: str
    arguments: list[str]
    nproc: int | None = None
    steps: int | None = None
    json: str | None = None
    html: str | None = None
    sarif: str | None = None
    junit: str | None = None
    github: bool = False
    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: FailOn = "error"
    is_module: bool = False
    hang_timeout: float = 300.0

    @property
    def files(self) -> dict[str, str]:
        """Where the files go that a program reads, by format."""
        given = {name: getattr(self, name) for name in FILE_FORMATS}
        return {name: path for name, path in given.items() if path is not None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the audit, and the script with what follows it."""
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=positive,
        metavar="N",
        help="start N processes (default 2; 1 if the script starts its own). "
        "Under another launcher there is nothing to start",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="K",
        help="watch the first K optimizer steps; the script runs on unwatched",
    )
    for name, text in _FILES.items():
        parser.add_argument(f"--{name}", type=_writable, metavar="FILE", help=text)
    parser.add_argument(
        "--github",
        action="store_true",
        help="print the findings as annotations of GitHub Actions, too",
    )
    parser.add_argument(
        "--only",
        type=_codes,
        default=(),
        metavar="CODES",
        help="report these only: LS101,LS203 or LS5",
    )
    parser.add_argument(
        "--ignore", type=_codes, default=(), metavar="CODES", help="do not report these"
    )
    parser.add_argument(
        "--fail-on",
        choices=("error", "warning", "never"),
        help=f"exit with {FOUND} if there are findings as grave as that (default error; under "
        f"another launcher never), and with {NOT_WATCHED} if ranks could not be watched",
    )
    parser.add_argument(
        "--hang-timeout",
        "--hang_timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="end the ranks S seconds after a hang was reported, with the report and, if it holds"
        f" no error, exit code {HUNG} (default 300; 0: never)",
    )
    parser.add_argument(
        *IS_MODULE,
        action="store_true",
        dest="is_module",
        help="SCRIPT is the name of a module, as after `python -m`",
    )
    parser.add_argument(
        "--version", action=PrintVersions, nargs=0, help="print the versions and leave"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script, unmodified")
    own = parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="the script's own arguments; those of the audit stand before SCRIPT",
    )
    own.required = False  # else argparse asks for them too where the script is missing


def from_namespace(read: argparse.Namespace, fail_on: FailOn = "error") -> Options:
    """The options of what argparse has read.

    Args:
        fail_on: where the user did not say.
    """
    values: dict[str, Any] = vars(read)
    values["nproc"] = values["nproc_per_node"]
    values["fail_on"] = values["fail_on"] or fail_on
    return Options(**{each.name: values[each.name] for each in fields(Options)})


def problem_with(options: Options) -> str | None:
    """Why there is no such script to run, in a sentence; None if there is, or if Python knows."""
    script, path = options.script, Path(options.script)
    if not script:
        return "the name of the script is empty"
    if options.is_module:
        is_file = script.endswith(".py") and path.is_file()
        return f"{script} is a file, and -m takes the name of a module" if is_file else None
    if path.is_dir():
        return f"{script} is a directory; name the script in it"
    if not path.exists():
        return f"there is no file {script} (looked in {Path.cwd()})"
    if not os.access(path, os.R_OK):
        return f"{script} cannot be read"
    return None


def file_of(options: Options) -> Path | None:
    """The file that will run; None if only an import would tell, which is the ranks' business."""
    if not options.is_module:
        return Path(options.script)
    inner = Path(*options.script.split("."))
    for folder in (Path.cwd(), *map(Path, sys.path)):
        package = (folder / inner / "__init__.py").is_file()
        found = folder / (inner / "__main__.py" if package else inner.with_suffix(".py"))
        if package or found.is_file():
            return found if os.access(found, os.R_OK) else None
    return None


def positive(text: str) -> int:
    """A number of things, from the command line."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def seconds(text: str) -> float:
    """A duration from the command line; 0 is none."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _writable(text: str) -> str:
    folder = Path(text).absolute().parent
    if Path(text).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    # Absolute: the script may go to another folder.
    return str(Path(text).absolute())


def _codes(text: str) -> tuple[str, ...]:
    from lockstep.audit.rules import all_codes

    known = all_codes()
    codes = tuple(part.strip().upper() for part in text.split(",") if part.strip())
    for code in codes:
        if not _LATIN.fullmatch(code) or not any(name.startswith(code) for name in known):
            raise argparse.ArgumentTypeError(
                f"{code!r} is no code of the audit ({', '.join(sorted(known))})"
            )
    return codes
