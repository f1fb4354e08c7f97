# SPDX-License-Identifier: Apache-2.0
"""What a worker is doing, seen from another thread of its process.

Read from the stack of the thread that trains, so that training pays nothing for it.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from lockstep.worker.report import Counted

_HERE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES: Final = (f"{os.sep}torch{os.sep}", f"{os.sep}ray{os.sep}", f"{os.sep}threading.py")

WAITING: Final = "waiting for the others"

# The innermost of these on the stack says what goes on.
_PHASES: Final = {
    (os.path.join("data", "fetch.py"), None): "reading data",
    (os.path.join("worker", "cursor.py"), "take"): "reading data",
    (os.path.join("operator", "loops.py"), "_loss_and_metrics"): "forward",
    (os.path.join("operator", "loops.py"), "backward"): "backward",
    (os.path.join("operator", "precision.py"), "step"): "optimizer",
    (os.path.join("operator", "loops.py"), "validate_batch"): "validation",
    (os.path.join("worker", "process_group.py"), "form_group"): "meeting the others",
    (os.path.join("worker", "state.py"), None): "copying state",
    (os.path.join("engine", "ray.py"), "_wait_for_peers"): WAITING,
    ("group.py", None): WAITING,
    (os.path.join("sync", "wire.py"), "ask"): WAITING,
}


@dataclass(frozen=True)
class WorkerStatus:
    """What a rank is doing.

    Attributes:
        steps: global batches that it has committed in this call; grows while all is well.
        is_warm: its process has committed one before, so that none of its own firsts is ahead.
        phase: in a word or two.
        line: the innermost line of the user's code, or "".
        stack: the whole stack, as Python prints it.
        counted: what it has counted so far, or a moment ago; None where that is not known.
    """

    steps: int
    is_warm: bool
    phase: str
    line: str
    stack: str
    counted: Counted | None = None

    @property
    def waits(self) -> bool:
        """It waits for other ranks, in a collective."""
        return self.phase == WAITING


def status_of_thread(
    thread_id: int, steps: int, counted: Counted | None, *, is_warm: bool
) -> WorkerStatus:
    """Where the thread `thread_id` of this process is."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return WorkerStatus(steps, is_warm, "idle", "", "", counted)
    stack = "".join(traceback.format_stack(frame))
    return WorkerStatus(steps, is_warm, _phase(frame), _users_line(frame), stack, counted)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _phase(frame: FrameType) -> str:
    for each in _outwards(frame):
        file = each.f_code.co_filename
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in file:
            return WAITING
        if not file.startswith(_HERE):
            continue
        name = file.removeprefix(_HERE)
        found = _PHASES.get((name, each.f_code.co_name)) or _PHASES.get((name, None))
        if found is not None:
            return found
    return "its own code"


def _users_line(frame: FrameType) -> str:
    for each in _outwards(frame):
        file = each.f_code.co_filename
        if file.startswith(_HERE) or any(part in file for part in _LIBRARIES):
            continue
        # None while a thread is between two lines, whatever the annotation says.
        number = each.f_lineno or each.f_code.co_firstlineno
        text = linecache.getline(file, number).strip()
        return f"{file}:{number} in {each.f_code.co_name}: {text}"
    return ""
