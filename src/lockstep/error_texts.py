# SPDX-License-Identifier: Apache-2.0
"""Words that errors and warnings of several modules have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

NEW_TRAINER: Final = "create a new TorchTrainer; load(path) goes on from a checkpoint"
LOAD_LAST: Final = "build a new trainer and load the last checkpoint"
GO_ON: Final = "go on from the last checkpoint"


def error_text(error: BaseException) -> str:
    """The text of `error`, or its class where the class's own `__str__` fails."""
    try:
        return str(error) or repr(error)
    except Exception:
        return f"{type(error).__name__}, whose own text cannot be shown"


def first_line(error: BaseException) -> str:
    """The first line of the text of `error`; its class where there is none."""
    return (error_text(error).strip() or type(error).__name__).splitlines()[0]


def first_of(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` of `names`, and how many more there are."""
    rest = [f"and {len(names) - most} more"] if len(names) > most else []
    return separator.join([*names[:most], *rest])
