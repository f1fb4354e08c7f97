# SPDX-License-Identifier: Apache-2.0
"""Reads the status of a worker from another thread of its process: phase, line and stack.

The training thread enters phases (`lockstep.phases`). Its stack is read only when the driver asks,
so that training pays nothing for it.
"""

from __future__ import annotations

import linecache
import os
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lockstep.phases import Phase, phase_of
from lockstep.thread_frames import frames_of_thread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from lockstep.worker.report import LoopCounts
    from lockstep.worker.worker import Worker

_LOCKSTEP_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES: Final = (f"{os.sep}torch{os.sep}", f"{os.sep}ray{os.sep}", f"{os.sep}threading.py")


@dataclass(frozen=True)
class WorkerStatus:
    """The status of a rank during a call.

    Attributes:
        steps: global batches that it has committed in this call.
        is_warm: its process has committed a step, so that its slow first step is over.
        phase: the phase of its training thread.
        line: the innermost line of the user's code, or "".
        stack: the whole stack, as Python prints it.
        counted: a recent copy of its counts; None if there is none.
        num_wrong_shards: how often ``shadow_every`` has found this process to be wrong.
    """

    steps: int
    is_warm: bool
    phase: Phase
    line: str
    stack: str
    counted: LoopCounts | None = None
    num_wrong_shards: int = 0

    @property
    def waits(self) -> bool:
        """Whether the rank waits for other ranks in a collective."""
        return self.phase is Phase.WAITING

    @property
    def is_in_collective(self) -> bool:
        """Whether the rank waits in a collective of lockstep's, or in one that the user called.

        A rank `waits` in any code of `torch.distributed`; some of it (a checkpoint that is written,
        say) needs no other rank.
        """
        file = self.stack.rpartition('File "')[2].partition('"')[0]
        is_collective = f"{os.sep}lockstep{os.sep}" in file or file.endswith("distributed_c10d.py")
        return self.waits and is_collective


def status_of(worker: Worker, thread_id: int) -> WorkerStatus:
    """The status of `worker`, which trains in the thread `thread_id`."""
    call = worker.loop_run
    if call is None:
        return status_of_thread(thread_id, 0, None, is_warm=False)
    is_warm = worker.is_warm or call.own_steps > 0
    # A loop that is over may be that of an earlier call: this call may not have begun here yet.
    counted = None if call.is_over else call.counted
    status = status_of_thread(thread_id, call.committed.steps, counted, is_warm=is_warm)
    shadow = worker.operator._lockstep.shadow if worker.is_built else None
    return status if shadow is None else replace(status, num_wrong_shards=shadow.num_wrong)


def status_of_thread(
    thread_id: int, steps: int, counted: LoopCounts | None, *, is_warm: bool
) -> WorkerStatus:
    """The status of the thread `thread_id` of this process, with the given counts."""
    frames = frames_of_thread(thread_id)
    if not frames:
        return WorkerStatus(steps, is_warm, Phase.NO_THREAD, "", "", counted)
    phase = Phase.WAITING if _is_in_torch_distributed(frames) else phase_of(thread_id)
    outermost_first = ((frame, frame.f_lineno) for frame in reversed(frames))
    stack = "".join(traceback.StackSummary.extract(outermost_first).format())
    return WorkerStatus(steps, is_warm, phase, _users_line(frames), stack, counted)


def _is_in_torch_distributed(frames: Sequence[FrameType]) -> bool:
    """Whether the user's code waits in torch's own collective, which enters no phase."""
    for each in frames:
        package, _, rest = each.f_globals.get("__name__", "").partition(".")
        if package == "lockstep":
            return False
        if package == "torch" and rest.partition(".")[0] == "distributed":
            return True
    return False


def _users_line(frames: Sequence[FrameType]) -> str:
    for each in frames:
        file = each.f_code.co_filename
        if file.startswith(_LOCKSTEP_FOLDER) or any(part in file for part in _LIBRARIES):
            continue
        # `f_lineno` is None between two lines, despite its annotation.
        number = each.f_lineno or each.f_code.co_firstlineno
        text = linecache.getline(file, number).strip()
        return f"{file}:{number} in {each.f_code.co_name}: {text}"
    return ""
