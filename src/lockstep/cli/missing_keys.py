# SPDX-License-Identifier: Apache-2.0
"""Tells what to type where an operator's `setup` reads a key that its config does not have."""

from __future__ import annotations

import inspect
import re
import traceback
from typing import TYPE_CHECKING, Any, Final

from lockstep.keys import BATCH_SIZE

if TYPE_CHECKING:
    from lockstep.operator import TrainingOperator

_RAISING_LINE: Final = re.compile(r'^ *File "[^"\n]*", line \d+, in (\S+)\n(.*)$', re.MULTILINE)
_SUBSCRIPT: Final = re.compile(r"\[([^][]+)\]")
_LITERAL: Final = re.compile(r"""(["'])(.+)\1""")


def note_missing_key(
    error: KeyError, operator: type[TrainingOperator], config: dict[str, Any]
) -> None:
    """Add to `error` what to type, where the line that raised it reads the key from the config.

    A config that a function of the user's gets may be a part of the operator's.
    """
    function, line = _raising_line(error)
    names = ["config", *list(inspect.signature(operator.setup).parameters)[1:2]]
    path = _missing_path(error.args[0] if error.args else None, line, names, config)
    if path is None:
        return
    given = "--batch-size 64" if path == BATCH_SIZE else f"--set {path}=..."
    what = "the config has no" if function == "setup" else "if it is the operator's config without"
    error.add_note(f"{what} {path!r}: {given}, or --config FILE")


def _raising_line(error: KeyError) -> tuple[str, str]:
    """The name of the innermost function, and its line; empty if they are not known."""
    # An error of another process brings its traceback in a note.
    notes = getattr(error, "__notes__", [])
    told = "\n".join(["".join(traceback.format_tb(error.__traceback__)), *notes])
    frames = _RAISING_LINE.findall(told)
    return frames[-1] if frames else ("", "")


def _missing_path(key: Any, line: str, names: list[str], config: dict[str, Any]) -> str | None:
    """The path as ``--set`` takes it, if `line` subscripts a config with `key`, and it lacks it."""
    one_of = "|".join(map(re.escape, names))
    subscripts = rf"(?<![\w.])(?:self\.)?(?:{one_of})((?:\[[^][]+\])+)"
    for found in re.findall(subscripts, line) if isinstance(key, str) else []:
        path: list[str] = []
        part: Any = config
        for text in _SUBSCRIPT.findall(found):
            literal = _LITERAL.fullmatch(text)
            path.append(literal[2] if literal else key)
            if not isinstance(part, dict):
                break
            if path[-1] == key and key not in part:
                return ".".join(path)
            part = part.get(path[-1])
    return None
