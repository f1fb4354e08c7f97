# SPDX-License-Identifier: Apache-2.0
"""Which line of the user's program is running."""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.audit.finding import Place
from lockstep.thread_frames import frames_of_thread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

_OURS: Final = str(Path(__file__).resolve().parents[2])
_LIBRARY: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_INSTALLED: Final = ("site-packages", "dist-packages")
_RAY: Final = tuple(f"{folder}{os.sep}ray{os.sep}" for folder in _INSTALLED)
_DEPTH: Final = 4
_LOCALS: Final = frozenset({"locals", "vars", "f_locals"})

_known: dict[str, int] = {}


def _distance(file: str) -> int:
    """0: the user's own file. 1: an installed library. 2: torch, Python, Ray or ours."""
    distance = _known.get(file)
    if distance is None:
        if file.startswith((_OURS, *_torchs(), "<")) or any(folder in file for folder in _RAY):
            distance = 2
        elif any(folder in file for folder in _INSTALLED):
            distance = 1
        else:
            distance = 2 if file.startswith(_LIBRARY) else 0
        _known[file] = distance
    return distance


def _torchs() -> list[str]:
    """The folder that torch lies in, if it has been imported: no file of its own ran before."""
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return [] if file is None else [str(Path(file).parent)]


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame, that of its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_called_by(name: str) -> bool:
    """Is a function of this name under way, at any depth?"""
    return any(frame.f_code.co_name == name for frame in outwards(sys._getframe(1)))


def outermost_module() -> Any:
    """The first of the modules that are being called; None if none is."""
    found: FrameType | None = None
    for frame in outwards(sys._getframe(1)):
        if frame.f_code.co_name == "_call_impl" and _distance(frame.f_code.co_filename) == 2:
            found = frame
    return None if found is None else found.f_locals.get("self")


def users_frames(count: int) -> list[FrameType]:
    """The innermost `count` frames that are neither torch's nor ours."""
    walked = outwards(sys._getframe(1))
    theirs = (frame for frame in walked if _distance(frame.f_code.co_filename) < 2)
    return list(itertools.islice(theirs, count))


def looks_at_its_locals(frame: FrameType) -> bool:
    """May the program hold the frame's dictionary of locals? To ask for it would write to it."""
    return not _LOCALS.isdisjoint(frame.f_code.co_names)


def lines_through_a_library() -> list[Place]:
    """The user's lines, and behind them the library's that they led to, if one did."""
    inner = next(iter(users_frames(1)), None)
    lines = users_lines(outwards(inner))
    if inner is not None and _distance(inner.f_code.co_filename) == 1 and lines:
        place = _place_of(inner)
        return lines if place in lines else [*lines, place]
    return lines


def users_lines(frames: Iterable[FrameType] | None = None) -> list[Place]:
    """The innermost lines of the user's own files; of a library's if there are none.

    Costs a quarter of a microsecond a frame; the text is read later, by `with_text`.
    """
    own: list[Place] = []
    library: list[Place] = []
    for walked in outwards(sys._getframe(1)) if frames is None else frames:
        distance = _distance(walked.f_code.co_filename)
        if distance < 2:
            (own if distance == 0 else library).append(_place_of(walked))
        if len(own) == _DEPTH:
            break
    return own or library[:_DEPTH]


def _place_of(frame: FrameType) -> Place:
    code = frame.f_code
    # No line between two lines, where another thread looks.
    return Place(code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name, "")


def stack_of_main_thread() -> list[Place]:
    """Where the program stands, seen from another thread."""
    return users_lines(frames_of_thread(threading.main_thread().ident))
