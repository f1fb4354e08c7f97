# SPDX-License-Identifier: Apache-2.0
"""Rewrites the `fix` line of an error: arguments of `TorchTrainer` become command-line options."""

from __future__ import annotations

import re
from typing import Final

from lockstep.cli.train_options import TRAINER_OPTIONS, option_for
from lockstep.error_texts import GO_ON, LOAD_LAST, NEW_TRAINER

_RESUME: Final = "run it again with --checkpoint-dir DIR --resume auto"
_PHRASES: Final = {
    NEW_TRAINER: _RESUME,
    LOAD_LAST: _RESUME,
    GO_ON: f"then {_RESUME}",
    "config[BATCH_SIZE]": "--batch-size",
}
_CALL: Final = re.compile(r"TorchTrainer\((?:\.\.\., *)?(?P<given>\w+=[^()]*)\)")
_CONFIG: Final = re.compile(r"\bconfig=\{(?:lockstep\.keys\.)?BATCH_SIZE: *(?P<size>\w+)\}")
_NAMES: Final = "|".join(TRAINER_OPTIONS)
_ARGUMENT: Final = re.compile(
    rf"(?<![\w.-])(?P<name>{_NAMES})=(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;:)]+)"
)
# Without a value, only a name with an underscore is surely an argument: `seed` is also a word.
_ARGUMENT_NAME: Final = re.compile(
    rf"(?<![\w.-])({'|'.join(n for n in TRAINER_OPTIONS if '_' in n)})(?![\w=(])"
)
_SWITCHES: Final = {
    "reproducible": ("--reproducible", "no --reproducible"),
    "check_finite": ("no --no-check-finite", "--no-check-finite"),
}
"""The words to type for True, and for False."""
_NO: Final = {"True": "yes", "False": "no"}
_FIX: Final = "\n  fix  "


def with_cli_options(error: BaseException) -> str:
    """The text of `error`, with options of ``lockstep train`` in its `fix` line and no Python."""
    said, fix, advice = str(error).partition(_FIX)
    for phrase, ours in _PHRASES.items():
        advice = advice.replace(phrase, ours)
    advice = _CONFIG.sub(r"--batch-size \g<size>", advice)
    advice = _CALL.sub(lambda call: call["given"].replace(", ", " "), advice)
    advice = _ARGUMENT.sub(_option_of, advice)
    advice = _ARGUMENT_NAME.sub(lambda found: option_for(found[1]), advice)
    return "\n".join([said + fix + advice, *getattr(error, "__notes__", [])])


def _option_of(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"].strip("\"'")
    if name in _SWITCHES and value in _NO:
        return _SWITCHES[name][value == "False"]
    if value == "None":
        return f"no {option_for(name)}"
    return f"{option_for(name)} {_NO.get(value, value) if name == 'use_gpu' else value}"
